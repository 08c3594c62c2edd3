"""The lab's RPM hosts: an image like Kylin V10 SP3 and its repository, made of Debian 12."""
