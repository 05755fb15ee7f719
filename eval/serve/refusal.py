"""Requests that are refused."""

MAX_MESSAGE_LENGTH = 1000  # characters of an error
KINDS = {  # {status: kind of error}; others are 'invalid_request_error'
    401: 'authentication_error',
    429: 'rate_limit_error',
    500: 'server_error',
    503: 'server_error',
    504: 'timeout_error',
}


class Refusal(Exception):
    """An error response.

    Attributes:
      status: HTTP status.
      code: a word that programs compare.
      kind: the type of error.
      message: for people.
      retry_after: seconds.
    """

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.code = status, code
        self.message = message[:MAX_MESSAGE_LENGTH].encode(errors='backslashreplace').decode()
        self.kind = KINDS.get(status, 'invalid_request_error')
        self.retry_after = retry_after
