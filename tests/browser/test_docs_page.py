"""The documentation page works in a real browser, on a machine without the internet."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, async_playwright, expect

from tests.support.missing import not_tested_here
from tests.support.processes import Platform

# A Chromium that asks the network for nothing of its own, without the sandbox root cannot have.
ARGUMENTS = [
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    *(["--no-sandbox"] if os.geteuid() == 0 else []),
]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        not_tested_here("pages in a browser", "no chromium found")
    async with async_playwright() as playwright:
        found = await playwright.chromium.launch(
            executable_path=program, args=ARGUMENTS, timeout=120_000
        )
        yield found
        await found.close()


async def test_docs_page_lists_the_operations_and_asks_no_other_host(
    browser: Browser, sqlite_platform: Platform
) -> None:
    sqlite_platform.dispatcher()
    page = await browser.new_page()
    urls: list[str] = []
    failures: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.on("pageerror", lambda error: failures.append(str(error)))

    await page.goto(f"{sqlite_platform.url}/docs", timeout=90_000)
    operation = page.locator('.opblock-summary-path[data-path="/openapi/jobs"]').first
    await expect(operation).to_be_visible(timeout=90_000)

    here = urlsplit(sqlite_platform.url).netloc
    parts = [urlsplit(url) for url in urls]
    assert [part for part in parts if part.scheme != "data" and part.netloc != here] == []
    assert failures == []
