"""Traffic for the model that ships: openings in the manner of its five topics, whose mix drifts.

Each topic sends its tokens to experts of its own, so that a change of the mix moves the load.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from itertools import pairwise

TOPICS = ("scripture", "novels", "atlas", "manual", "code")

# Openings with gaps that are filled at random, so that no two prompts share much of a prefix.
_OPENINGS: dict[str, tuple[str, ...]] = {
    "scripture": (
        "{Name} {n}\n\n1 And it came to pass in the days of {Name}, that the people of {Name}",
        "{n} Then said {Name} unto the elders, Behold, the men of {Name} have taken the",
        "{n} And {Name} begat {Name}, and the sons of {Name} were {n} and",
        "{n} Hear the word, O house of {Name}: for the day of the harvest is",
    ),
    "novels": (
        '"My dear Miss {Name}," said Mrs. {Name}, "I am persuaded that your brother will',
        "Mr. {Name} had been only {n} days in the country, when his sister perceived that",
        "{Name} could not but smile at the letter, though it gave her more pain than",
        "The party at {Name} Park was very large, and Miss {Name}, who was fond of dancing,",
    ),
    "atlas": (
        "{Name}: Geography\n\nLocation: Southern {Name}, bordering the",
        "{Name}: Economy\n\nGDP - real growth rate: {n}%\nLabor force - by occupation:",
        "{Name}: Energy\n\nElectricity - production: {n} billion kWh\nElectricity - exports:",
        "{Name}: Transportation\n\nAirports: {n}\nRailways - total: {n} km\nRoadways:",
    ),
    "manual": (
        "The {name} option of a CREATE INDEX statement is ignored when the table has {n} rows",
        "If the {name} argument is NULL then the function returns the number of",
        "SELECT {name}, count(*) FROM {name} WHERE rowid>{n} GROUP BY",
        "Each {name} of the database file holds {n} bytes of content, followed by",
    ),
    "code": (
        "/*\n** Return the {name} of entry {n} of the list, or 0 if there is none.\n*/\nstatic int",
        "static int {name}Find({Name} *p, int n{n}){\n  int rc;\n  for(i=0; i<n{n};",
        "#ifdef SQLITE_{NAME}\n# define {NAME}_MAX {n}\n#else",
        "  if( p->{name}=={n} ){\n    sqlite3_free(p->a{Name});\n    return",
    ),
}
_GAP = re.compile(r"\{(Name|NAME|name|n)\}")
_SYLLABLES = ("ba", "den", "ka", "lor", "mi", "nath", "or", "pel", "ri", "sam", "tu", "ver")

# (share of the run, weights of the topics): a slow drift, an abrupt switch to code and back, a
# short burst of scripture, a late change that stays. Between two moments weights change evenly.
_MIX: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0.00, (1, 6, 1, 1, 1)),
    (0.38, (6, 1, 3, 1, 1)),
    (0.381, (1, 1, 1, 3, 14)),
    (0.58, (1, 1, 1, 6, 8)),
    (0.581, (3, 6, 1, 2, 1)),
    (0.70, (2, 4, 3, 3, 1)),
    (0.701, (20, 1, 1, 1, 1)),
    (0.75, (20, 1, 1, 1, 1)),
    (0.751, (2, 4, 3, 3, 1)),
    (0.84, (2, 3, 4, 3, 1)),
    (0.841, (1, 2, 12, 1, 1)),
    (1.00, (1, 1, 14, 2, 1)),
)


def mix(share: float) -> tuple[float, ...]:
    """Shares of the topics (their sum is 1) when ``share`` of the run (0 to 1) has passed."""
    index = min(max(bisect_right([at for at, _ in _MIX], share), 1), len(_MIX) - 1)
    (begin, before), (end, after) = _MIX[index - 1], _MIX[index]
    way = min(max((share - begin) / (end - begin), 0.0), 1.0)
    weights = [a + (b - a) * way for a, b in zip(before, after, strict=True)]
    return tuple(weight / sum(weights) for weight in weights)


def switches() -> list[float]:
    """Shares of the run at which the mix changes at once."""
    return [begin for (begin, _), (end, _) in pairwise(_MIX) if end - begin < 0.002]


def prompt(rng: random.Random, share: float) -> str:
    """One request's prompt at that moment of the run."""
    (topic,) = rng.choices(TOPICS, mix(share))
    return _GAP.sub(lambda gap: _word(rng, gap[1]), rng.choice(_OPENINGS[topic]))


def _word(rng: random.Random, kind: str) -> str:
    if kind == "n":
        return str(rng.randrange(2, 150))
    name = "".join(rng.choices(_SYLLABLES, k=rng.choice((2, 3))))
    return {"Name": name.capitalize(), "NAME": name.upper(), "name": name}[kind]
