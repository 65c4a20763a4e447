"""The doctor: every line has a level, and a remedy where something is wrong."""

from __future__ import annotations

import json

from keepstep.service.doctor import Check, examine, healthy, show


def test_every_check_that_is_not_ok_has_a_remedy():
    checks = examine()
    assert {"python", "torch", "data plane", "pidfd", "memfd"} <= {check.name for check in checks}
    assert [check for check in checks if check.level != "OK" and not check.remedy] == []


def test_only_a_failure_is_unhealthy():
    warning, failure = Check("WARN", "a", "b", "c"), Check("FAIL", "a", "b", "c")
    assert healthy([warning]) and not healthy([warning, failure])


def test_both_forms_say_the_same():
    checks = (Check("FAIL", "torch", "not installed", "pip install it"), Check("OK", "python", "3.11"))
    text = show(checks, json=False)
    assert text.splitlines()[0] == "FAIL  torch          not installed -> pip install it"
    assert [line["name"] for line in json.loads(show(checks, json=True))] == ["torch", "python"]
