"""What holds for every host of every inventory in this folder."""

# A locale whose messages pyinfra's facts can read, whatever the host's own is.
_env = {"LC_ALL": "C"}

# Hosts are reached only with a known host key.
ssh_strict_host_key_checking = "yes"
