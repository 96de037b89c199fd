"""Load generation and proofs that a user can run."""
