"""Real hosts on this machine: booted systemd containers with sshd, and the site they live in."""
