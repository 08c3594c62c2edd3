"""A worked example: two Ubuntu groups (H100, A100), a Kylin group, a gateway. Copy it, then edit.

Each list is a group. What holds for a group stands in group_data/<group>.py, what holds for every
host in group_data/all.py. The name of this file is a group too (group_data/prod.py): it overrides
the others, so only keys of the whole environment belong there.
"""

h100 = [
    ("gpu-h100-1", {"ssh_hostname": "10.20.0.11", "service_address": "10.30.0.11"}),
    ("gpu-h100-2", {"ssh_hostname": "10.20.0.12", "service_address": "10.30.0.12"}),
]

a100 = [
    ("gpu-a100-1", {"ssh_hostname": "10.20.0.21", "service_address": "10.30.0.21"}),
]

kylin = [
    ("gpu-kylin-1", {"ssh_hostname": "10.20.0.31", "service_address": "10.30.0.31"}),
]

gateway = [
    ("gw-1", {"ssh_hostname": "10.20.0.2", "service_address": "10.30.0.2"}),
]
