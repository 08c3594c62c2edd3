#!/bin/sh
# PREFIX/bin/conda: runs the frontend with the Python beside it, wherever PREFIX is.
here=$(dirname "$(readlink -f "$0")") || exit 1
# A minimal host has no certificate authorities; where it has, they are the ones to trust.
if [ ! -e /etc/ssl/certs/ca-certificates.crt ]; then
    export SSL_CERT_FILE="${SSL_CERT_FILE:-${here%/bin}/ssl/cacert.pem}"
fi
exec "$here/python3.11" -I -m conda_frontend "$@"
