"""A real browser for tests of the pages: chromium, driven over the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dry_support import PATIENCE_S, wait_until

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium: apt-get install chromium"
)


class Browser:
    """As much of the DevTools protocol as the tests need, over its WebSocket."""

    def __init__(self, url: str) -> None:
        host, port, path = re.match(r"ws://([^:/]+):(\d+)(/.*)", url).groups()  # type: ignore[union-attr]
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.buffer = b""
        while b"\r\n\r\n" not in self.buffer:
            self.buffer += self.socket.recv(4096)
        self.buffer = self.buffer.split(b"\r\n\r\n", 1)[1]
        self.number = 0
        self.events: list[dict[str, Any]] = []

    def _take(self, n: int) -> bytes:
        while len(self.buffer) < n:
            part = self.socket.recv(1 << 16)
            assert part, "the browser went away"
            self.buffer += part
        taken, self.buffer = self.buffer[:n], self.buffer[n:]
        return taken

    def _message(self) -> dict[str, Any]:
        data = b""
        while True:
            first, length = self._take(2)
            if length == 126:
                length = struct.unpack(">H", self._take(2))[0]
            elif length == 127:
                length = struct.unpack(">Q", self._take(8))[0]
            data += self._take(length)
            if first & 0x80:
                message: dict[str, Any] = json.loads(data)
                return message

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        data = json.dumps({"id": self.number, "method": method, "params": params}).encode()
        mask = os.urandom(4)
        size = (
            struct.pack(">B", 0x80 | len(data)) if len(data) < 126
            else struct.pack(">BH", 0x80 | 126, len(data))
        )  # fmt: skip
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self.socket.sendall(b"\x81" + size + mask + masked)
        while True:
            message = self._message()
            if message.get("id") == self.number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def visit(self, page: Path) -> None:
        """Until its scripts have run: earlier, the page before may answer, or nothing."""
        self.call("Page.enable")
        at, url = len(self.events), page.as_uri()
        self.call("Page.navigate", url=url)
        while self._event(at).get("params", {}).get("frame", {}).get("url") != url:
            at += 1
        while self._event(at)["method"] != "Page.loadEventFired":
            at += 1

    def _event(self, at: int) -> dict[str, Any]:
        while len(self.events) <= at:
            self.events.append(self._message())
        return self.events[at]

    def value(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")


def _pages(port: str) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=PATIENCE_S) as answer:
        return [
            each["webSocketDebuggerUrl"] for each in json.load(answer) if each["type"] == "page"
        ]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
            "--remote-allow-origins=*", "--window-size=1200,1000", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            told = Path(profile) / "DevToolsActivePort"
            wait_until(lambda: told.exists() and told.read_text().strip(), child)
            port = told.read_text().split()[0]
            wait_until(lambda: _pages(port), child)  # it may not have one yet
            page = Browser(_pages(port)[0])
            try:
                yield page
            finally:
                page.socket.close()
        finally:
            child.terminate()
            child.wait(timeout=PATIENCE_S)
