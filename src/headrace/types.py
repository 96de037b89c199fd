"""The nouns that every part of Headrace shares. Imports nothing heavy, since every process needs them."""

from enum import StrEnum


class Ending(StrEnum):
    """How a request ended. Every request received has exactly one.

    **Invariant** (metric `headrace_conservation_difference`, tests/promises/test_one_ending.py):
    received = answered + rejected + failed + expired + abandoned + in_flight, at every moment.
    """

    ANSWERED = "answered"
    REJECTED = "rejected"
    FAILED = "failed"
    EXPIRED = "expired"
    ABANDONED = "abandoned"


class Blame(StrEnum):
    """Whose trouble an error is; decides the status family and who is told."""

    CALLER = "caller"
    SERVER = "server"
    CAPACITY = "capacity"
    DEADLINE = "deadline"


class ReplicaState(StrEnum):
    """Life of one loaded model version in one worker."""

    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
