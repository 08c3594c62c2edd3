"""A run during which Nginx is denied its server: the look at the audit log has to find it."""

from pyinfra.operations import server

from roles import selinux

server.shell(
    name="A request without the boolean",
    commands=[
        "setsebool httpd_can_network_connect=0 httpd_can_network_relay=0",
        "systemctl restart nginx.service",
        "curl -s -o /dev/null http://127.0.0.1:8080/v1/models",
    ],
)
selinux.audit()
