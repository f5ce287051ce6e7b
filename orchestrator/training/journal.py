"""Where a trial says what happens: the protocol, its null, and a list for tests and callers."""

from typing import Any, Protocol


class JournalSink(Protocol):
    """Where a trial says what happens."""

    def append(self, event: dict[str, Any]) -> None:
        """Takes one event: plain values, with the event's kind under `event`."""


class NullJournal:
    """Forgets every event."""

    def append(self, event: dict[str, Any]) -> None:
        """Does nothing."""


class ListJournal:
    """Keeps every event in memory.

    Attributes:
        events: in the order in which they came.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def append(self, event: dict[str, Any]) -> None:
        """Keeps the event."""
        self.events.append(event)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]
