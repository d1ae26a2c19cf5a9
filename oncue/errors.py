"""What may go wrong for a caller, as a small tree.

    OncueError
    ├── ApiError        the server answered and refused: `code`, `status`, `detail`
    │   ├── Invalid       400, 413, 415, 422: the request must be changed
    │   ├── Unauthorized  401, 403: the key is missing or wrong
    │   ├── NotFound      404: there is no such job
    │   └── Conflict      409, 412: the request does not fit what is there
    ├── Unavailable     no usable answer, although the request was repeated
    ├── JobFailed       the job ended, but not as SUCCEEDED: `job`
    ├── WaitTimeout     the job had not ended in time, and goes on: `job`
    └── BulkTimeout     the bulk operation had not ended in time, and goes on: `operation`

Codes are listed in docs/callers.md; they are stable, the sentences are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oncue.results import BulkOperation, Job


class OncueError(Exception):
    """The root of all errors of the client."""


class ApiError(OncueError):
    """The server answered and refused. `problem` is the whole document that it sent."""

    def __init__(
        self, code: str, status: int, detail: str, problem: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{detail} ({code})")
        self.code = code
        self.status = status
        self.detail = detail
        self.problem: Mapping[str, Any] = problem or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.status, self.detail, self.problem)


class Invalid(ApiError):
    """The request is not valid; `detail` says what to change."""


class Unauthorized(ApiError):
    """The key is missing, wrong, or may not do this."""


class NotFound(ApiError):
    """There is no such job."""


class Conflict(ApiError):
    """The request does not fit what is there: another body under this id, or the job's state."""


class Unavailable(OncueError):
    """No usable answer, although the request was repeated: whether it was done is unknown.

    `request_id` is the clientRequestId of a submission: submit again with it and the same
    arguments, at any time, and there is still only one job. `last` is the server's last refusal,
    None when it could not be reached.
    """

    def __init__(
        self, message: str, *, request_id: str | None = None, last: ApiError | None = None
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.last = last


class JobFailed(OncueError):
    """The job ended as FAILED or CANCELLED."""

    def __init__(self, job: Job) -> None:
        why = f": {job.error.message} ({job.error.code})" if job.error else ""
        super().__init__(f"job {job.job_id} ended as {job.status}{why}")
        self.job = job

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.job,)


class WaitTimeout(OncueError):
    """The job had not ended in time; it goes on, and can be waited for again."""

    def __init__(self, job: Job, timeout: float) -> None:
        super().__init__(f"job {job.job_id} is still {job.status} after {timeout:g} s")
        self.job = job
        self.timeout = timeout

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.job, self.timeout)


class BulkTimeout(OncueError):
    """The bulk operation had not ended in time; it goes on, and can be waited for again."""

    def __init__(self, operation: BulkOperation, timeout: float) -> None:
        super().__init__(
            f"bulk operation {operation.operation_id} is still {operation.status} "
            f"after {timeout:g} s"
        )
        self.operation = operation
        self.timeout = timeout

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.operation, self.timeout)


_CLASS_OF_STATUS: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    409: Conflict,
    412: Conflict,
    413: Invalid,
    415: Invalid,
    422: Invalid,
}


def api_error(status: int, problem: object) -> ApiError:
    """Make the error for a problem document, or for whatever a proxy sent in its place."""
    fields: Mapping[str, Any] = problem if isinstance(problem, dict) else {}
    code = fields.get("code")
    detail = fields.get("detail") or fields.get("title")
    return _CLASS_OF_STATUS.get(status, ApiError)(
        code if isinstance(code, str) else f"http_{status}",
        status,
        detail if isinstance(detail, str) else f"the server answered {status} without a reason",
        fields,
    )
