#!/bin/sh
# The lab's conda installer: unpacks the archive that follows this text into PREFIX.
# Needs a POSIX shell, tail, gzip and tar.
set -eu

usage="usage: sh $0 -b -p PREFIX   (-b: ask nothing; PREFIX must not exist)"
batch=
prefix=
while getopts bp:h option; do
    case $option in
        b) batch=1 ;;
        p) prefix=$OPTARG ;;
        h) echo "$usage"; exit 0 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
if [ -z "$batch" ] || [ -z "$prefix" ]; then
    echo "$usage" >&2
    exit 2
fi
if [ -e "$prefix" ]; then
    echo "ERROR: File or directory already exists: '$prefix'" >&2
    exit 1
fi
archive() { tail -n +@FIRST_LINE@ "$0"; }
if ! archive | gzip -t; then
    echo "ERROR: $0 is damaged or incomplete: fetch it again" >&2
    exit 1
fi
rm -rf "$prefix.partial"
mkdir -p "$prefix.partial"
archive | gzip -dc | tar -xf - -C "$prefix.partial"
mv "$prefix.partial" "$prefix"
echo "installed $prefix/bin/conda"
exit 0
