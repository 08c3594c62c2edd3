"""Which host asks the sources for which piece, so that all of them together ask for each once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

GRACE_S = 3.0
"""How long a host may be away before the others take its share over."""
PATIENCE_S = 10.0
"""How long nothing may come from the others before their pieces are asked for here."""


class Shares:
    """Every host computes the same shares from the same list of hosts; nobody negotiates.

    Piece ``n`` is the share of host ``n mod hosts``, so that all of them read the same region of
    the source at one time and files become whole one after the other. The share of a host that
    is away, or that nothing comes from, falls to the others in the same way.
    """

    def __init__(self, pieces: int, me: str, others: Collection[str], now: float) -> None:
        """``me``, ``others``: addresses; ``now``: monotonic seconds, as in `observe`."""
        self._me = me
        self._members = sorted({me, *others})
        self._have: Sequence[bool] = [False] * pieces
        self._available: Sequence[int] = [0] * pieces
        self._last_seen = dict.fromkeys(others, now)
        self._silent: set[str] = set()
        self._others_gave = now
        self._had = self._known = 0
        self._ring = [me]
        self._stuck = False
        self._now = now

    def observe(
        self,
        have: Sequence[bool],
        available: Sequence[int],
        connected: Collection[str],
        busy: int,
        own: int,
        now: float,
    ) -> None:
        """Take in what the session sees.

        Args:
            have: whether each piece is here.
            available: how many connected hosts have each piece.
            connected: addresses of the connected hosts.
            busy: pieces that a source is asked for now.
            own: pieces that came from the sources so far, here.
        """
        self._have, self._available, self._now = have, available, now
        for member in connected:
            self._last_seen[member] = now
        had = sum(have) - own
        known = sum(map(bool, available))
        if had > self._had or known > self._known:
            self._stuck = False
        if had > self._had or known > self._known or busy:
            self._others_gave = now
        self._had, self._known = had, known
        if now - self._others_gave > PATIENCE_S:
            self._give_up_on_somebody()
            self._others_gave = now
        self._ring = [
            member
            for member in self._members
            if member == self._me
            or (member not in self._silent and now - self._last_seen[member] <= GRACE_S)
        ]

    def _give_up_on_somebody(self) -> None:
        """Nothing comes: whose pieces nobody has is silent; if there is none, a peer hangs."""
        owing = {
            self._owner(piece)
            for piece, (here, there) in enumerate(zip(self._have, self._available, strict=True))
            if not here and not there
        } - {self._me}
        self._silent |= owing
        self._stuck = not owing

    def _owner(self, piece: int) -> str:
        owner = self._members[piece % len(self._members)]
        if owner in self._ring:
            return owner
        return self._ring[piece // len(self._members) % len(self._ring)]

    def next(self, may_ask: Callable[[int], bool]) -> int | None:
        """The piece to ask the sources for now; None: none for the moment."""
        for piece, here in enumerate(self._have):
            if here or not may_ask(piece):
                continue
            if self._stuck or (not self._available[piece] and self._owner(piece) == self._me):
                return piece
        return None
