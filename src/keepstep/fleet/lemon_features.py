"""What is known of a node by a date, and a score fitted on the past alone. Pure.

Features of 28 days after Meta, HPCA 2025, section 5: jobs that excluded the node, distinct XIDs, tickets, times taken
out, multi-node failures caused, single-node failures, single-node failure rate. What the tables do not hold is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import optimize

from keepstep.fleet.lemons import WINDOW_DAYS, NodeEvents, counts_before, decayed_before

__all__ = ["SIGNALS", "feature_matrix", "forward_scores"]

SIGNALS: tuple[str, ...] = (
    "excluded",
    "xids",
    "tickets",
    "taken_out",
    "multi_node_failures",
    "single_node_failures",
    "failed_checks",
)
"""Kinds of events that say something about a node; tickets and exclusions only where a source has them."""

_RIDGE = 1.0


def feature_matrix(signals: Mapping[str, NodeEvents], dates: Any, *, single_node_days: Any = None) -> Any:
    """[date, node, feature]: log(1 + count) of each signal in the window, the recency of each, and the single-node
    failure rate (failures over days of single-node jobs in the window, [date, node]) where days are given."""
    columns = []
    for name in SIGNALS:
        if name in signals:
            columns.append(np.log1p(counts_before(signals[name], dates)))
            columns.append(np.log1p(decayed_before(signals[name], dates, decay=7.0)))
    if single_node_days is not None and "single_node_failures" in signals:
        failures = counts_before(signals["single_node_failures"], dates)
        columns.append(np.log1p(failures / (single_node_days + 1.0)))
    return np.stack(columns, axis=-1) if columns else np.zeros((len(dates), 0, 0))


def forward_scores(features: Any, outcome: Any, *, dates: Any, window: float = WINDOW_DAYS) -> Any:
    """Probabilities of a ridge logistic regression, for each date fitted only on dates whose outcome was known then.

    Dates without a past to fit on get the sum of the features.
    """
    scores = features.sum(axis=-1)
    for row, date in enumerate(dates):
        known = np.asarray(dates) + window <= date
        if known.any() and 0 < outcome[known].sum() < outcome[known].size:
            weights = _fitted(features[known].reshape(-1, features.shape[-1]), outcome[known].ravel())
            scores[row] = features[row] @ weights[1:] + weights[0]
    return scores


def _fitted(features: Any, outcome: Any) -> Any:
    """Intercept and weights by maximum likelihood with a ridge on the weights."""
    design = np.column_stack([np.ones(len(features)), features])
    target = outcome.astype(float)

    def loss(weights: Any) -> tuple[float, Any]:
        linear = design @ weights
        error = 1.0 / (1.0 + np.exp(-np.clip(linear, -30.0, 30.0))) - target
        value = float((np.logaddexp(0.0, linear) - target * linear).sum() + _RIDGE / 2 * (weights[1:] ** 2).sum())
        return value, design.T @ error + _RIDGE * np.append(0.0, weights[1:])

    return optimize.minimize(loss, np.zeros(design.shape[1]), jac=True, method="L-BFGS-B").x
