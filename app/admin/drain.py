"""Draining a worker for an operator: on record, and without the internal token at hand."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.access.caller import Caller
from app.edge.problems import Problem
from app.ground import Ground
from app.lifecycle.audit import record_deed
from app.lifecycle.nodes import Node, mark_draining, read_node
from app.lifecycle.reads import read_now
from app.lifecycle.tenants import DEFAULT_TENANT
from app.plumbing.bus import BEAT
from app.plumbing.http import NoAnswer
from oncue.protocol import DRAIN_PATH, DrainResponse, WorkerState

ANSWER_SECONDS = 5.0


async def drain_worker(ground: Ground, caller: Caller, worker_id: str) -> dict[str, Any]:
    """Let a worker take no more runs, and return what it still holds; a repeat looks again.

    Raises:
        Problem: `forbidden`, `worker_not_found`, `worker_down` or `worker_unreachable`.
    """
    if not caller.runs_the_platform:
        raise Problem(
            "forbidden",
            "Workers are shared: only keys of the tenant 'default' may drain them.",
            needs="operate",
        )
    node = await ground.database.write(
        lambda connection: _mark(connection, ground, caller, worker_id)
    )
    ground.bus.publish(BEAT, [worker_id])
    # Should this fail, the worker's next beat says UP again.
    answer = await _ask(ground, node)
    return {
        "workerId": node.worker_id,
        "name": node.name,
        "state": str(answer.state),
        "active": answer.load.active,
        "unreported": answer.unreported,
        "deliveries": answer.deliveries,
    }


async def _mark(
    connection: AsyncConnection, ground: Ground, caller: Caller, worker_id: str
) -> Node:
    """Note that a worker is to drain, with who wants it."""
    node = await read_node(connection, worker_id)
    if node is None:
        raise Problem(
            "worker_not_found",
            "No worker has this workerId, or it has left: GET /openapi/workers lists them.",
        )
    if node.state is WorkerState.DOWN:
        raise Problem("worker_down", f"Worker {node.name} is DOWN: it takes nothing anyway.")
    if await mark_draining(connection, worker_id):
        await record_deed(
            connection,
            caller.doing("worker.drain"),
            f"worker:{worker_id}",
            tenant_id=DEFAULT_TENANT,
            now_ms=await read_now(connection, ground.database),
            old={"state": str(node.state)},
            new={"state": str(WorkerState.DRAINING)},
        )
    return node


async def _ask(ground: Ground, node: Node) -> DrainResponse:
    try:
        reply = await ground.client.post(
            node.url + DRAIN_PATH, b"", seconds=ANSWER_SECONDS, call_token=node.call_token
        )
        if reply.status == HTTPStatus.OK:
            return DrainResponse.model_validate(reply.body)
        why = f"it answers {reply.status}"
    except (NoAnswer, ValidationError) as error:
        why = type(error).__name__
    raise Problem("worker_unreachable", f"Worker {node.name} could not be told ({why}): repeat it.")
