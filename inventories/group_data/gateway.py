"""The host that clients talk to: Nginx over all servers."""

platform = "ubuntu-22.04"
nginx_listen = 8080
