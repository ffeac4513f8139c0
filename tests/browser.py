"""A browser for tests of pages: headless Chromium, where there is one."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Browser:
    "Headless Chromium, spoken to through a pipe by its DevTools protocol."

    FLAGS = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking "
        "--disable-component-update --disable-sync --remote-debugging-pipe --hide-scrollbars"
    ).split()

    def __init__(self, folder: Path):
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()

        def files() -> None:  # it reads from 3 and writes to 4
            a = os.dup(theirs_in)
            b = os.dup(theirs_out)
            os.dup2(a, 3)
            os.dup2(b, 4)
            for fd in (3, 4):
                os.set_inheritable(fd, True)

        self.process = subprocess.Popen(
            [str(CHROMIUM), *self.FLAGS, f"--user-data-dir={folder}", "about:blank"],
            close_fds=False,
            preexec_fn=files,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.number = 0
        self.rest = b""
        self.events = list[dict[str, Any]]()
        self.session = ""
        while not (
            pages := [
                t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"
            ]
        ):
            time.sleep(0.05)  # the window is not there yet
        self.session = self.send(
            "Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        session = {"sessionId": self.session} if self.session else {}
        os.write(
            self.out,
            json.dumps({"id": self.number, "method": method, "params": params} | session).encode()
            + b"\0",
        )
        while True:
            message = self._receive()
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]

    def _receive(self, seconds: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self.rest:
            assert select.select([self.into], [], [], seconds)[0], "Chromium does not answer"
            data = os.read(self.into, 1 << 20)
            assert data, "Chromium has ended"
            self.rest += data
        one, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(one)
        if "method" in message:
            self.events.append(message)
        return message

    def size(self, width: int, height: int, dark: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media="", features=scheme)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    def js(self, code: str) -> Any:
        result = self.send(
            "Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, code: str, seconds: float = 120.0) -> Any:
        end = time.monotonic() + seconds
        while not (value := self.js(code)):
            assert time.monotonic() < end, f"{code}: {self.js('document.body.innerText')}"
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        "A real click, in the middle of an element."
        self.js(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        x, y = self.js(
            "(r => [r.x + r.width / 2, r.y + r.height / "
            f"2])(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        self.click_at(x, y)

    def click_at(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                **({"text": " "} if key == " " and kind == "keyDown" else {}),
            )

    def errors(self) -> list[Any]:
        "What the console has: errors, warnings, exceptions."
        self.js("0")
        bad = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                bad.append(params["exceptionDetails"])
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in (
                "error",
                "warning",
                "assert",
            ):
                bad.append(params)
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in (
                "error",
                "warning",
            ):
                bad.append(params["entry"])
        return bad

    def picture(self, path: str | Path, whole: bool = True) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        with suppress(Exception):
            self.send("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self.out)
        os.close(self.into)
