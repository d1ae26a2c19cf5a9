"""What a caller may have meant is named beside what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from app.edge.nearest import did_you_mean
from app.edge.problems import validation_problem
from app.jobs.bulk_schemas import SubmitBulk
from app.jobs.requests import BackfillJobs, ChangeJob, SubmitJob, TriggerJob

A_JOB = {"clientRequestId": "a", "jobName": "a", "jobHandler": "echo"}
HOOK = {"callbackUrl": "https://93.184.216.34/x"}


@pytest.mark.parametrize(
    ("model", "sent", "pointer", "meant"),
    [
        (SubmitJob, {**A_JOB, "catchUpWindow": 1}, "/catchUpWindow", "catchUpWindowMs"),
        (SubmitJob, {**A_JOB, "max_retry": 1}, "/max_retry", "maxRetry"),
        (
            SubmitJob,
            {**A_JOB, **HOOK, "callbackHeaders": {"X-A": {"secret": "s", "secrets": "s"}}},
            "/callbackHeaders/X-A/secrets",
            "secret",
        ),
        (SubmitBulk, {"action": "cancel", "filter": {"createdfrom": 1}}, "/filter/createdfrom",
         "createdFrom"),
        (ChangeJob, {"intervalMS": 1000}, "/intervalMS", "intervalMs"),
        (TriggerJob, {"param": 1}, "/param", "params"),
        (BackfillJobs, {"maxConcurency": 1}, "/maxConcurency", "maxConcurrent"),
        (SubmitJob, {**A_JOB, "zzz": 1}, "/zzz", None),
    ],
)  # fmt: skip
def test_an_unknown_field_is_told_with_the_nearest_known_one(
    model: type[BaseModel], sent: dict[str, Any], pointer: str, meant: str | None
) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(sent)
    problem = validation_problem(list(caught.value.errors(include_url=False)), model)
    (told,) = [one for one in problem.document()["errors"] if one["pointer"] == pointer]
    ending = "" if meant is None else f": did you mean `{meant}`?"
    assert told["detail"] == f"is not a field of this request{ending}"


def test_a_name_of_any_length_costs_nothing() -> None:
    assert did_you_mean("a" * 1_000_000, ["a" * 60]) == ""
