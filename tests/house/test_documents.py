"""Documents are true: blocks run, commands exist, links lead somewhere, guarantees have tests."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from blueprint import ROOT, Block, blocks, documents, place, python_files, written_files

from keepstep.service.settings import load_settings

JOB = "keepstep run"  # `<!-- keepstep run -->` above a python block: it is a training script
GUARANTEES = ROOT / "docs" / "guarantees.md"
CITED = re.compile(r"\bG-(\d+)\b")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
# Homes and temporary folders of one machine; the names are split so that this file is not a finding.
MACHINE_PATHS = re.compile("|".join(["/ro" + "ot/", "/ho" + "me/[a-z]+/", "/wo" + "rk/", "/tm" + "p/ks"]))


def each(found: list[Block]) -> list:
    return [pytest.param(block, id=block.name) for block in found]


@pytest.mark.parametrize("block", each([block for block in blocks("python") if block.note != JOB]))
def test_python_blocks_run(block, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", block.text], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("block", each([block for block in blocks("python") if block.note == JOB]))
def test_job_blocks_train(block, tmp_path):
    """A block that is a training script runs to its end on two ranks."""
    script = tmp_path / "script.py"
    script.write_text(block.text)
    command = [sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", "2", "--standby", "0"]
    done = subprocess.run(
        [*command, "--run", str(tmp_path / "run"), str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_json_blocks_parse():
    for block in blocks("json"):
        assert json.loads(block.text), block.name


@pytest.mark.parametrize("block", each(blocks("toml")))
def test_toml_blocks_are_settings(block, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(block.text)
    assert load_settings(file, overrides={}, default=tmp_path / "none.toml")


def command_lines() -> list[tuple[str, str]]:
    """(place, line) of every shell line in the documents; continued lines are joined."""
    found = []
    for block in blocks("bash", "sh", "console"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ").split(" #")[0].strip()
            if words and (block.language != "console" or line.startswith("$ ")):
                found.append((block.name, words))
    return found


@functools.cache
def help_of(command: str) -> str:
    """What `keepstep COMMAND --help` prints; fails where there is no such command."""
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.cli", *command.split(), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, f"keepstep {command}: {done.stderr}"
    return done.stdout


def own_words(words: list[str]) -> list[str]:
    """The words up to and without the user's script: what follows it is the script's business."""
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return words[:index]
    return words


def check_keepstep_line(words: list[str]) -> None:
    """The command exists and has every option that the line uses."""
    mine = own_words(words)
    depth = 2 if mine[:1] in (["drill"], ["traffic"], ["fleet"], ["plan"]) else 1
    command = " ".join(word for word in mine[:depth] if not word.startswith("-"))
    text = help_of(command)
    for option in (word.split("=")[0] for word in mine if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text), f"keepstep {command} has no {option}"


@pytest.mark.parametrize(("where", "line"), command_lines())
def test_commands_exist(where, line):
    words = shlex.split(line)
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]
    if words[0] == "keepstep":
        check_keepstep_line(words[1:])
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets), where
    for word in words:
        if word.endswith((".py", ".sh")) and "/" in word:
            assert (ROOT / word).is_file(), f"{where}: {word}"


@pytest.mark.parametrize("path", [pytest.param(path, id=place(path)) for path in documents()])
def test_links_lead_somewhere(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for match in LINK.finditer(prose):
        target, _, fragment = (match[1] or match[2]).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (path.parent / target) if target else path
        if not file.exists() or (fragment and fragment not in anchors(file)):
            broken.append(match[0])
    assert broken == []


def anchors(path) -> set[str]:
    """The headings of a document as link targets."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def numbers(text: str) -> set[int]:
    return {int(number) for number in CITED.findall(text)}


def stated() -> list[int]:
    return [int(number) for number in re.findall(r"^\*\*G-(\d+)\*\*", GUARANTEES.read_text(), re.MULTILINE)]


def test_guarantees_are_numbered_from_one():
    assert stated() == list(range(1, len(stated()) + 1))


def test_every_guarantee_is_cited_by_a_test():
    cited = set().union(*(numbers(path.read_text()) for path in python_files("tests") if path.name.startswith("test_")))
    assert {f"G-{number}" for number in set(stated()) - cited} == set(), "no test cites these"
    assert {f"G-{number}" for number in cited - set(stated())} == set(), "no such guarantee"


def test_no_file_names_a_place_on_one_machine():
    text = {".py", ".c", ".h", ".md", ".toml", ".txt", ".json", ".jsonl", ".in", ""}
    found = [place(path) for path in written_files() if path.suffix in text and MACHINE_PATHS.search(path.read_text())]
    assert found == []


def test_decisions_are_numbered_and_whole():
    """Each decision says in which state it is, what was decided and why."""
    files = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(path.name[:4]) for path in files] == list(range(1, len(files) + 1))
    for path in files:
        for part in ("Status:", "## Decision", "## Why", "## Consequences"):
            assert part in path.read_text(), f"{place(path)}: {part}"


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    (decision,) = (ROOT / "docs" / "decisions").glob("*-dependencies.md")
    reasons = decision.read_text()
    assert [name for name in (re.split(r"[><=\[]", wish)[0] for wish in wanted) if f"**{name}**" not in reasons] == []


def test_the_changelog_has_this_version():
    import keepstep

    assert f"## {keepstep.__version__}" in (ROOT / "CHANGELOG.md").read_text()
