"""The skill's evaluation: ten requests for an op, one line each, and tests that no request shows.

An agent gets `prompt(request, language)` and the skill. `score` runs the hidden tests on what it
made. This folder is no part of the skill: do not let the agent read it.
"""

from __future__ import annotations

from .prompt import prompt
from .requests import REQUESTS, Request, find
from .score import Group, Score, score

__all__ = ["REQUESTS", "Group", "Request", "Score", "find", "prompt", "score"]
