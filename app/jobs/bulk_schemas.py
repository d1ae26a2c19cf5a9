"""What callers send and get of bulk operations."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic.alias_generators import to_camel

from app.edge.wire import Int64, Key, Moment, StatusWord, Timestamp, Wire
from app.jobs.documents import JobError

Action = Literal["cancel", "retry", "pause", "resume", "redeliver"]
OperationWord = Literal["QUEUED", "RUNNING", "SUCCEEDED", "CANCELLED", "FAILED"]
ONE_OF = ("handler", "name_prefix", "label")


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not have a NUL character")
    return value


def _name_and_value(value: str) -> str:
    name, equals, _ = value.partition("=")
    if not name or not equals:
        raise ValueError("must be name=value")
    return value


Text = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(_without_nul)]


class BulkFilter(Wire):
    """Which jobs: `status`, one of handler, namePrefix and label, and one range of times."""

    status: StatusWord | None = Field(
        None, description="One that allows the action; without it all that do."
    )
    handler: Text | None = None
    name_prefix: Text | None = Field(None, description="The start of the jobName.")
    label: Annotated[Text, AfterValidator(_name_and_value)] | None = Field(
        None, description="`name=value`"
    )
    created_from: Moment | None = Field(None, description="Created then or later.")
    created_to: Moment | None = Field(None, description="Created before that.")
    finished_from: Moment | None = Field(None, description="Finished then or later.")
    finished_to: Moment | None = Field(None, description="Finished before that.")

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        given = [name for name in ONE_OF if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"send one of {', '.join(map(to_camel, given))}")
        created = self.created_from is not None or self.created_to is not None
        if created and self.by_finish:
            raise ValueError("send a range of creation or of finishing, not both")
        return self

    @property
    def by_finish(self) -> bool:
        """Whether the range is one of finishing."""
        return self.finished_from is not None or self.finished_to is not None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is narrowed."""
        return all(value is None for value in self.__dict__.values())


class SubmitBulk(Wire):
    """One action for all jobs that match."""

    action: Action = Field(
        description="`redeliver`: their callbacks that have failed (given up, or waiting for the "
        "next try after a failed one) are tried again; jobs without such ones do not match."
    )
    filter: BulkFilter = Field(description="Must not be empty.")
    dry_run: bool = Field(False, strict=True, description="Only count what matches.")
    rate_per_second: float | None = Field(
        None, ge=0.1, le=10_000, strict=True, description="Most jobs a second."
    )
    client_request_id: Key | None = Field(
        None, description="The idempotency key: the same request again is the same operation."
    )


class BulkCount(Wire):
    """What a dry run found; nothing was changed."""

    dry_run: Literal[True]
    action: Action
    filter: BulkFilter
    matched: Int64
    matched_is_minimum: bool = Field(description="true: at least so many; the count was ended.")


class BulkOperation(Wire):
    """A bulk action under way, or how it ended."""

    operation_id: str
    client_request_id: str | None
    action: Action
    filter: BulkFilter
    status: OperationWord
    rate_per_second: float
    matched: Int64 = Field(description="Jobs that matched when it was asked for.")
    matched_is_minimum: bool = Field(description="true: at least so many; the count was ended.")
    examined: Int64 = Field(description="Jobs that had their turn: changed and refused.")
    changed: Int64
    refused: dict[str, Int64] = Field(
        description="How many were left as they are, by the code that says why."
    )
    error: JobError | None
    created_at: Timestamp
    updated_at: Timestamp
    started_at: Timestamp | None
    finished_at: Timestamp | None


class BulkOperationList(Wire):
    """A page of bulk operations, newest first."""

    items: list[BulkOperation]
    next_cursor: str | None
