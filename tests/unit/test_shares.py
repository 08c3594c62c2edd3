"""Which host asks the sources for which piece."""

from __future__ import annotations

from collections.abc import Collection

from fp8fleet.fetch.shares import GRACE_S, PATIENCE_S, Shares

HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4")
PIECES = 24


class Host:
    """One host's view, at a time that the test sets."""

    def __init__(self, me: str, hosts: Collection[str] = HOSTS) -> None:
        self.others = {host for host in hosts if host != me}
        self.shares = Shares(PIECES, me, self.others, 0.0)
        self.have = [False] * PIECES
        self.available = [0] * PIECES
        self.own = 0

    def at(self, now: float, connected: Collection[str] | None = None, busy: int = 0) -> Host:
        online = self.others if connected is None else connected
        self.shares.observe(self.have, self.available, online, busy, self.own, now)
        return self

    def share(self) -> set[int]:
        """Every piece that the host would ask for, one after the other."""
        asked: set[int] = set()
        while (piece := self.shares.next(lambda piece: piece not in asked)) is not None:
            asked.add(piece)
        return asked


def test_all_hosts_together_ask_for_every_piece_once() -> None:
    shares = [Host(me).at(1).share() for me in HOSTS]
    assert sorted(piece for share in shares for piece in share) == list(range(PIECES))
    assert {len(share) for share in shares} == {PIECES // len(HOSTS)}


def test_all_hosts_read_the_same_region_at_one_time() -> None:
    first = [Host(me).at(1).shares.next(lambda piece: True) for me in HOSTS]
    assert first == [0, 1, 2, 3]


def test_a_piece_that_is_here_or_that_a_peer_has_is_not_asked_for() -> None:
    host = Host(HOSTS[0])
    host.have[0], host.available[4] = True, 1
    assert host.at(1).share() == {8, 12, 16, 20}


def test_the_share_of_a_host_that_is_away_falls_to_the_others_evenly() -> None:
    online = HOSTS[:3]
    shares = [Host(me).at(GRACE_S + 1, set(online) - {me}).share() for me in online]
    assert sorted(piece for share in shares for piece in share) == list(range(PIECES))
    assert {len(share) for share in shares} == {PIECES // 3}


def test_a_host_that_is_late_by_less_than_the_grace_keeps_its_share() -> None:
    host = Host(HOSTS[0]).at(GRACE_S - 1, HOSTS[1:3])
    assert len(host.share()) == PIECES // len(HOSTS)


def test_a_host_that_comes_late_gets_its_share_back() -> None:
    host = Host(HOSTS[0]).at(GRACE_S + 1, HOSTS[1:3])
    assert len(host.share()) == PIECES // 3
    assert len(host.at(GRACE_S + 2).share()) == PIECES // len(HOSTS)


def test_a_host_without_any_peer_asks_for_everything() -> None:
    assert Host(HOSTS[0]).at(GRACE_S + 1, ()).share() == set(range(PIECES))


def idle(silent: str) -> Host:
    """The first host with its own share here and the others' too, but for ``silent``'s."""
    host = Host(HOSTS[0]).at(1)
    missing = HOSTS.index(silent)
    host.have = [piece % len(HOSTS) != missing for piece in range(PIECES)]
    host.own = PIECES // len(HOSTS)
    return host.at(2)


def test_the_share_of_a_connected_host_that_gives_nothing_falls_to_the_others() -> None:
    host = idle(HOSTS[3])
    assert host.at(2 + PATIENCE_S).share() == set()
    taken = host.at(3 + PATIENCE_S).at(4 + PATIENCE_S).share()
    assert len(taken) == 2
    assert all(piece % len(HOSTS) == 3 for piece in taken)


def test_nobody_loses_patience_while_a_source_is_asked() -> None:
    host = idle(HOSTS[3])
    for now in range(3, 60, 5):
        host.at(now, busy=1)
    assert host.share() == set()


def test_nobody_loses_patience_while_pieces_come() -> None:
    host = idle(HOSTS[3])
    for number in range(5):
        host.available[3 + 4 * number] = 1
        host.at(5 * number + 5)
    assert host.share() == set()


def test_pieces_of_a_peer_that_hangs_are_asked_for_though_it_has_them() -> None:
    host = Host(HOSTS[0])
    host.available = [1] * PIECES
    host.at(1)
    assert host.at(PATIENCE_S).share() == set()
    assert host.at(PATIENCE_S + 2).share() == set(range(PIECES))
    host.have[0] = True
    assert host.at(PATIENCE_S + 3).share() == set()
