"""What a request carries and its route does not take: refused, since to ignore it would be silent.

A caller that writes `?chidren=true`, or sends `params` to a verb that takes none, means something
by it, and must not believe that it was done.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import Request
from pydantic import BaseModel

from app.edge.problems import invalid, pointer_to

NOTHING: Final = frozenset((b"", b"{}", b"null"))
"""Bodies that say nothing: clients send them with a POST of nothing."""


async def refuse_unasked(request: Request) -> None:
    """Refuse parameters that the route does not know, or twice, and a body that it does not read.

    Raises:
        Problem: `validation_failed`.
    """
    route = request.scope["route"]
    if request.scope["query_string"]:
        _refuse_parameters(request, _parameters(route))
    if _takes_a_body(route) or not _has_body(request):
        return
    if (await request.body()).strip() not in NOTHING:
        raise invalid("this call takes no body: send none", "")


def _refuse_parameters(request: Request, known: list[str]) -> None:
    given = request.query_params
    takes = f"this call takes {', '.join(known)}" if known else "this call takes none"
    for name in given:
        if name not in known:
            raise invalid(f"is not a parameter: {takes}", pointer_to(name))
        if len(given.getlist(name)) > 1:
            raise invalid("send it once", pointer_to(name))


def _parameters(route: Any) -> list[str]:
    names: list[str] = []
    for field in route.dependant.query_params:
        model = field.field_info.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            names += [one.alias or name for name, one in model.model_fields.items()]
        else:
            names.append(field.alias)
    return names


def _has_body(request: Request) -> bool:
    headers = request.headers
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _takes_a_body(route: Any) -> bool:
    return route.body_field is not None or "requestBody" in (route.openapi_extra or {})
