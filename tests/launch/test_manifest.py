"""The manifest on the page about launching says what workers look for."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "launch.md"


def test_the_manifest_is_consistent():
    (manifest,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    variables = re.findall(r"- name: ([A-Z_]+)$", manifest, re.MULTILINE)
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ARPC_SECRET"} <= set(variables)
    (size,) = re.findall(r'- name: WORLD_SIZE\n +value: "(\d+)"', manifest)
    assert re.findall(r"(?:completions|parallelism): (\d+)", manifest) == [size, size]
    service, job = manifest.split("---\n")
    (name,) = re.findall(r"metadata:\n  name: (\w+)", job)
    assert f"job-name: {name}" in service
    (domain,) = re.findall(r"metadata:\n  name: (\w+)", service)
    assert f"subdomain: {domain}" in job
    assert f"value: {name}-0.{domain}\n" in job  # what an indexed Job calls the pod of rank 0
