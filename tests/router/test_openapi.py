"""The OpenAPI document tells the truth: schemathesis sends what it allows and what it forbids, with fake workers behind
the app. Bounded: a fixed seed and so many examples an operation."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from router.harness import MODEL, Harness
from starlette.testclient import TestClient

from pdserve.configs.schema import RouterConfig
from pdserve.router.openai_api import IGNORED, NEUTRAL, ChatRequest, CompletionRequest
from pdserve.router.openapi import openapi_document
from pdserve.text.tokenizer import Tokenizer

schemathesis = pytest.importorskip("schemathesis", reason="pip install -e '.[dev]'")
