"""A server under mixed load for minutes: ``python tests/clients/soak.py --minutes 10 --connections 200``.

Clients that stream and that do not, that leave early, that ask nonsense, that send too much. Prints a table of what
came back and what was found wrong; exit status 1 if anything was. Right is: no 5xx, every accepted request answered
exactly once, refusals only where they belong, the memory of both processes flat after warm-up, all blocks free at the
end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers.serving import Server  # noqa: E402

MAX_BODY = 1 << 20  # bytes; the server's limit here
MAX_MODEL_LEN = 512
OPTIONS = (
    "log_level=warning", "max_body_mib=1", "max_queue=150", "engine.max_num_seqs=64",
    f"engine.max_model_len={MAX_MODEL_LEN}", "engine.num_kv_blocks=512",
)  # fmt: skip
PATIENCE = 120  # seconds after which a request that is not answered is a fault
DRIFT = 0.05
WARM_UP = 240  # seconds: a shorter run ends while allocators and pools still grow, and its memory is only printed
WORDS = ["import json", "class Stack:", "def main():", "for x in y:", "return", "raise ValueError(", "# a comment"]


class Soak:
    def __init__(self, server: Server, connections: int, seed: int) -> None:
        self.server = server
        self.connections = connections
        self.random = random.Random(seed)
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)  # by kind of request
        self.faults: list[str] = []
        self.memory: list[tuple[float, int, int]] = []  # (time, server's KiB, engine's KiB)
        self.answered = self.left = 0  # choices: of these the server's metrics speak
        self.count = 0

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        watcher = asyncio.create_task(self.watch())
        await asyncio.gather(*(self.client(end) for _ in range(self.connections)))
        watcher.cancel()

    async def watch(self) -> None:
        while True:
            sizes = [resident_kib(pid) for pid in (self.server.process.pid, self.server.engine_pid)]
            self.memory.append((time.monotonic(), sizes[0], sizes[1]))
            await asyncio.sleep(0.5)

    async def client(self, end: float) -> None:
        kinds = [self.whole] * 6 + [self.stream] * 8 + [self.structured] * 2 + [self.leave] * 4
        kinds += [self.malformed] * 2 + [self.too_long, self.oversize]
        while time.monotonic() < end:
            kind = self.random.choice(kinds)
            try:
                async with asyncio.timeout(PATIENCE):
                    await kind()
            except TimeoutError:
                self.fault(kind.__name__, f"no answer in {PATIENCE} s")
            except (OSError, EOFError) as error:
                self.fault(kind.__name__, f"{type(error).__name__}: {error}")

    def fault(self, kind: str, what: str) -> None:
        self.answers[kind]["fault"] += 1
        self.faults.append(f"{kind}: {what}"[:300])

    # ------------------------------------------------------------------------------------------- kinds of requests

    def body(self, **more: Any) -> dict[str, Any]:
        rng = self.random
        words = " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, 5, 30])))
        wish: dict[str, Any] = {"max_tokens": rng.choice([1, 8, 40, 120]), "temperature": rng.choice([0, 0.8])}
        if rng.random() < 0.2:
            wish["n"] = 3
        if rng.random() < 0.2:
            wish["logprobs"] = 3
        if rng.random() < 0.1:
            wish["stop"] = ["\n\n", "self"]
        return {"prompt": words, **wish, **more}

    async def whole(self) -> None:
        body = self.body()
        if status := await self.accepted("whole", body):
            choices = json.loads(status)["choices"]
            self.check("whole", len(choices) == body.get("n", 1) and all(c["finish_reason"] for c in choices), status)

    async def stream(self) -> None:
        body = self.body(stream=True)
        if text := await self.accepted("stream", body):
            events = re.findall(r"^data: (.*)$", text, re.M)
            reasons = Counter()
            for event in events[:-1]:
                for choice in json.loads(event).get("choices", []):
                    reasons[choice["index"]] += choice["finish_reason"] is not None
            right = events[-1:] == ["[DONE]"] and reasons == dict.fromkeys(range(body.get("n", 1)), 1)
            self.check("stream", right, text[-300:])

    async def structured(self) -> None:
        body = self.body(guided_regex="[a-z]{3,8}-[0-9]{2}", max_tokens=40)
        body.pop("stop", None)
        if text := await self.accepted("structured", body):
            choices = json.loads(text)["choices"]
            right = all(re.fullmatch("[a-z]{3,8}-[0-9]{2}", choice["text"]) for choice in choices)
            self.check("structured", right, text)

    async def leave(self) -> None:
        """Go away at some moment: before the answer, or in the middle of it."""
        body = self.body(stream=self.random.random() < 0.7, max_tokens=200)
        reader, writer = await self.ask(json.dumps(body))
        try:
            async with asyncio.timeout(self.random.choice([0, 0.05, 0.5])):
                await reader.read(self.random.choice([1, 400, 3000]))
        except TimeoutError:
            pass
        writer.close()
        self.left += body.get("n", 1)
        self.answers["leave"]["left"] += 1

    async def malformed(self) -> None:
        bodies = [
            "{",
            "[]",
            '{"prompt": 3}',
            '{"prompt": ""}',
            '{"prompt": "x", "n": 0}',
            '{"prompt": "x", "top_p": 7}',
        ]
        bodies += ['{"prompt": "x", "no_such": 1}', '{"prompt": "x", "guided_regex": "("}', '{"prompt": [-1]}', "\x00"]
        bodies += ['{"prompt": "x", "model": "nobody"}', '{"prompt": "x", "temperature": 1e999, "stream": true}']
        await self.refused("malformed", self.random.choice(bodies), {400, 404})

    async def too_long(self) -> None:
        body = self.body(prompt=[1] * (MAX_MODEL_LEN + self.random.randrange(1000)))
        await self.refused("too long", json.dumps(body), {400})

    async def oversize(self) -> None:
        await self.refused("oversize", "x" * (MAX_BODY + 1 + self.random.randrange(MAX_BODY)), {413})

    # ------------------------------------------------------------------------------------------------ the connection

    async def ask(self, body: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.count += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=1 << 24)
        data = body.encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        return reader, writer

    async def answer(self, body: str) -> tuple[int, str]:
        reader, writer = await self.ask(body)
        try:
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        if not head:
            raise EOFError("the connection was closed without an answer")
        if b"transfer-encoding: chunked" in head.lower():
            rest = unchunked(rest)
        return int(head.split()[1]), rest.decode()

    async def accepted(self, kind: str, body: dict[str, Any]) -> str | None:
        """The body of an answer with status 200; None, and noted, for any other."""
        status, text = await self.answer(json.dumps(body))
        self.answers[kind][str(status)] += 1
        if status == 200:
            self.answered += body.get("n", 1)
            return text
        if status == 429:
            await asyncio.sleep(self.random.uniform(0.2, 1))
        else:
            self.fault(kind, f"{status} {text}")
        return None

    async def refused(self, kind: str, body: str, statuses: set[int]) -> None:
        status, text = await self.answer(body)
        self.answers[kind][str(status)] += 1
        if status not in statuses | {429} or "error" not in json.loads(text):
            self.fault(kind, f"{status} {text}")

    def check(self, kind: str, right: bool, text: str) -> None:
        if not right:
            self.fault(kind, f"answered wrongly: {text}")

    # ------------------------------------------------------------------------------------------------------ the end

    def verdict(self) -> list[str]:
        """What is wrong, beyond the faults of single requests."""
        wrong = []
        stats = self.server.wait_idle(timeout=60)
        if stats["num_free_blocks"] != stats["num_blocks"]:
            wrong.append(f"{stats['num_blocks'] - stats['num_free_blocks']} blocks were not given back")
        text = self.server.http.get("/metrics").text
        ended = {
            reason: int(float(count))
            for reason, count in re.findall(r'request_success_total{.*finished_reason="(\w+)".*} (\S+)', text)
        }
        if ended["error"]:
            wrong.append(f"{ended['error']} requests ended with an error")
        if not self.answered <= sum(ended.values()) <= self.answered + self.left:
            wrong.append(f"the server counts {ended}, for {self.answered} choices answered and {self.left} left")
        for name, column in (("server", 1), ("engine", 2)):
            sizes = [sample[column] for sample in self.memory]
            fifth = len(sizes) // 5
            warm, last = statistics.median(sizes[fifth : 2 * fifth]), statistics.median(sizes[-fifth:])
            print(f"{name + ' process':<16} {warm / 1024:.1f} MiB after warm-up, {last / 1024:.1f} MiB at the end")
            if abs(last / warm - 1) > DRIFT and self.memory[-1][0] - self.memory[0][0] > WARM_UP:
                wrong.append(f"the memory of the {name} process went from {warm:.0f} to {last:.0f} KiB")
        return wrong


def unchunked(body: bytes) -> bytes:
    parts, at = [], 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size


def resident_kib(pid: int) -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), *OPTIONS)
        soak = Soak(server, options.connections, options.seed)
        begin = time.monotonic()
        asyncio.run(soak.run(60 * options.minutes))
        print(f"{soak.count} requests in {time.monotonic() - begin:.0f} s over {options.connections} connections")
        for kind, statuses in sorted(soak.answers.items()):
            print(f"{kind:<16} " + ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items())))
        wrong = soak.verdict()
        if status := server.stop():
            wrong.append(f"the server ended with status {status}")
    for fault in [*dict.fromkeys(soak.faults)][:20] + wrong:
        print("FAULT", fault)
    print("faults:", len(soak.faults) + len(wrong))
    return int(bool(soak.faults or wrong))


if __name__ == "__main__":
    sys.exit(main())
