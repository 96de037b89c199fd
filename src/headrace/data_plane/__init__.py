"""The request path: from bytes on a socket to an answer and a record."""
