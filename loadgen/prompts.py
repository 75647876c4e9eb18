"""The prompts of the reports: sets to choose from, and files of a user's own.

The built-in sets never change, nor does their order: reports name a set, and take its first prompts.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import SettingsError

PROMPTS: tuple[str, ...] = (
    "Explain how a bicycle stays upright while it is moving.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "List the steps to make bread at home and say why each one matters.",
    "What is the difference between weather and climate? Give examples.",
    "Describe the water cycle to a ten-year-old child.",
    "Write a Python function that returns the prime numbers below n, and explain it.",
    "Compare travelling by train with travelling by plane.",
    "How does a computer store a picture?",
    "Give advice to somebody who starts to learn the piano as an adult.",
    "Summarise the life of a star from its birth to its end.",
    "Why do leaves change their colour in autumn?",
    "Write a polite letter to a neighbour about loud music at night.",
    "What are the main causes of the tides, and why are there two a day?",
    "Plan a three-day visit to a city by the sea.",
    "Explain the rules of chess to a beginner.",
    "How do vaccines work?",
    "Describe a day in the life of a beekeeper.",
    "What makes a good password, and why?",
    "Tell the story of the tortoise and the hare in your own words.",
    "Explain what inflation is and how it touches a family's budget.",
    "How is glass made?",
    "Write a dialogue between a teacher and a pupil about gravity.",
    "Give five ideas for saving water in a household and explain each one.",
    "What did the invention of printing change in Europe?",
)

CODE: tuple[str, ...] = (
    "Write a Python function `merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]` that merges "
    "overlapping and touching intervals. The input is not sorted. Add type hints, a docstring and two examples.",
    """Explain what this function does, step by step, and what its running time is:

```python
def plan(graph, start):
    best = {start: 0}
    queue = [(0, start)]
    while queue:
        cost, node = heapq.heappop(queue)
        if cost > best[node]:
            continue
        for neighbour, weight in graph[node].items():
            total = cost + weight
            if total < best.get(neighbour, math.inf):
                best[neighbour] = total
                heapq.heappush(queue, (total, neighbour))
    return best
```""",
    """This binary search sometimes never returns. Find the bug, explain it, and give the corrected function.

```python
def find(values: list[int], wanted: int) -> int:
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if values[middle] == wanted:
            return middle
        if values[middle] < wanted:
            low = middle
        else:
            high = middle
    return -1
```""",
    """Write pytest tests for this function. Cover the usual cases, the limits and the errors; use parametrize.

```python
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

def parse_duration(text: str) -> int:
    \"\"\"Seconds in a text such as `1h30m`; raises ValueError when it is none.\"\"\"
    parts = re.findall(r"(\\d+)([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"no duration: {text!r}")
    return sum(int(number) * UNITS[unit] for number, unit in parts)
```""",
    """We use PostgreSQL with these tables:

```sql
CREATE TABLE customers (id bigint PRIMARY KEY, name text NOT NULL, country text NOT NULL);
CREATE TABLE orders (
    id bigint PRIMARY KEY,
    customer_id bigint NOT NULL REFERENCES customers (id),
    placed_at timestamptz NOT NULL,
    total_cents bigint NOT NULL
);
```

Write a query that returns, for each country, the three customers who spent most in the last 90 days, with the sum and
the number of their orders. Which index would help it?""",
    """Refactor this JavaScript so that it is easier to read and to test, without changing what it does:

```javascript
function price(order) {
  let t = 0;
  for (let i = 0; i < order.items.length; i++) {
    if (order.items[i].qty > 0) {
      if (order.items[i].type === "book") {
        t = t + order.items[i].price * order.items[i].qty * 0.9;
      } else if (order.items[i].type === "food") {
        t = t + order.items[i].price * order.items[i].qty * 1.05;
      } else {
        t = t + order.items[i].price * order.items[i].qty * 1.2;
      }
    }
  }
  return order.customer && order.customer.vip ? t * 0.95 : t;
}
```""",
    """Convert this Python script to idiomatic Go. Keep its behaviour, and handle errors the Go way.

```python
import collections
import sys

def main() -> None:
    counts = collections.Counter()
    for name in sys.argv[1:]:
        with open(name, encoding="utf-8") as file:
            for line in file:
                counts.update(line.lower().split())
    for word, count in counts.most_common(10):
        print(f"{count:6} {word}")

main()
```""",
    "Write a bash script that backs up a PostgreSQL database with pg_dump, compresses the dump, names it by date, "
    "keeps the seven newest backups and deletes older ones. It must stop at the first error and be safe to run from "
    "cron.",
    "Write a TypeScript function `debounce` that wraps any function, keeps the types of its parameters, and has a "
    "`cancel` method. Explain how it works and show how to use it with an input field.",
    """This C function crashes for some inputs and leaks memory for others. List every problem and fix them.

```c
char *join(const char **words, int count) {
    char *text = malloc(64);
    for (int i = 0; i < count; i++) {
        if (words[i] == NULL)
            return NULL;
        strcat(text, words[i]);
        if (i < count - 1)
            strcat(text, ", ");
    }
    return text;
}
```""",
    """The Rust compiler rejects this with "cannot borrow `self.entries` as mutable because it is also borrowed as
immutable". Explain why, and show a version that compiles.

```rust
struct Cache {
    entries: HashMap<String, u64>,
}

impl Cache {
    fn evict_below(&mut self, limit: u64) {
        for (key, hits) in self.entries.iter() {
            if *hits < limit {
                self.entries.remove(key);
            }
        }
    }
}
```""",
    """This takes minutes for a hundred thousand records. Make it fast, and say what you changed and why:

```python
def duplicates(records):
    found = []
    for i in range(len(records)):
        for j in range(i + 1, len(records)):
            if records[i]["email"].lower() == records[j]["email"].lower():
                if records[i]["email"].lower() not in found:
                    found.append(records[i]["email"].lower())
    return sorted(found)
```""",
)

HASH_DIGITS = 8


@dataclass(frozen=True)
class PromptSet:
    """`name` is what reports say; it stands for the texts and their order."""

    name: str
    texts: tuple[str, ...]

    def count(self, asked: int | None, usual: int) -> int:
        """How many to use; None: `usual`, or all where there are fewer. Raises SettingsError when more are asked for
        than there are."""
        held = len(self.texts)
        if asked is None:
            return min(usual, held)
        if asked > held:
            raise SettingsError(f"{asked} prompts asked for, the set {self.name} holds {held}")
        return asked

    def text(self, number: int) -> str:
        """Prompts repeat when there are no more."""
        return self.texts[number % len(self.texts)]


EVERYDAY = PromptSet("everyday", PROMPTS)
BUILT_IN = {made.name: made for made in (EVERYDAY, PromptSet("code", CODE))}


def prompt_set(named: str) -> PromptSet:
    """A built-in set, or the one in a text file. Raises SettingsError when there is neither, or no prompt in it."""
    return BUILT_IN.get(named) or read(Path(named))


def read(file: Path) -> PromptSet:
    """The prompts of a UTF-8 file, separated by blank lines. The set is named by the file's base name and the first
    digits of its SHA-256. Raises SettingsError."""
    try:
        data = file.read_bytes()
        prompts = split(data.decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise SettingsError(f"no prompt set `{file}`: neither {', '.join(BUILT_IN)} nor a file") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"prompts in {file}: the file is no UTF-8 text") from error
    except OSError as error:
        raise SettingsError(f"prompts in {file} cannot be read: {error.strerror}") from error
    if not prompts:
        raise SettingsError(f"prompts in {file}: the file holds none")
    return PromptSet(f"{file.name}@{hashlib.sha256(data).hexdigest()[:HASH_DIGITS]}", prompts)


def split(text: str) -> tuple[str, ...]:
    """What stands between blank lines; lines within a prompt, and their indentation, stay."""
    lines = re.sub(r"\r\n?", "\n", text)
    return tuple(part.strip("\n").rstrip() for part in re.split(r"\n(?:[^\S\n]*\n)+", lines) if part.strip())
