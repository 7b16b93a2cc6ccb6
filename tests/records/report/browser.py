"""A headless Chromium over its debugging pipe (file descriptors 3 and 4), for which Python needs nothing more."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
    "about:blank",
)


def find_browser():
    """The path of a Chromium, None without one; ``FEDSTOP_BROWSER`` names another."""
    return os.environ.get("FEDSTOP_BROWSER") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page; what it complains about is in ``complaints``, the addresses it asks in ``asked``."""

    def __init__(self, path, timeout=60):
        self.timeout = timeout
        self.complaints, self.asked, self.events = [], [], []
        self._number, self._buffer = 0, b""
        self._profile = tempfile.mkdtemp(prefix="fedstop-browser-")
        to_child, self._to = self._pipe()
        self._from, from_child = self._pipe()
        # The descriptors are moved to 3 and 4 by the shell, for Python's own way is not safe beside threads.
        command = [
            "sh",
            "-c",
            f'exec "$@" 3</dev/fd/{to_child} 4>/dev/fd/{from_child}',
            "sh",
            path,
            f"--user-data-dir={self._profile}",
        ]
        self._process = subprocess.Popen(
            [*command, *_FLAGS], pass_fds=(to_child, from_child), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_child)
        os.close(from_child)
        self._session = None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    @staticmethod
    def _pipe():
        # Above 9, so that moving one to 3 or 4 does not close another.
        ends = []
        for end in os.pipe():
            ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
            os.close(end)
        return ends

    def show(self, path, width, height=900, dark=False, mobile=False):
        """Load a file in a window of a width, in CSS pixels."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self._ask("Page.navigate", url=Path(path).resolve().as_uri())
        end = time.monotonic() + self.timeout
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive(end)

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path, whole=True):
        """Write a PNG file of the page."""
        data = self._ask("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def _clip(self, whole):
        if not whole:
            return {}
        size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}}

    def pdf(self, path):
        """Print the page."""
        Path(path).write_bytes(base64.b64decode(self._ask("Page.printToPDF", printBackground=False)["data"]))

    def close(self):
        """End the browser and remove its profile."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _ask(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self.timeout
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self, end):
        """One message; events are kept."""
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("The browser does not answer.")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise RuntimeError("The browser has ended.")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method, params):
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
