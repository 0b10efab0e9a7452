"""Every line of every recipe can be begun."""

import inspect

import pytest

from bench.papers.recipes import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_jobs_have_the_arguments_of_what_they_call(name: str) -> None:
    jobs = RECIPES[name].jobs()
    assert len({job.key for job in jobs}) == len(jobs)
    for job in jobs:
        inspect.signature(job.call).bind(**job.arguments)
