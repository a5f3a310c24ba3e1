"""The parameters of a request name a wrong number of ranks: the two engines never connect any more."""

from kvfix_tools.lab.scenario import REQUEST, Options, Scenario
from kvfix_tools.lab.steps import ask, expect_all_ended, faults_end, malform, prompt, run

SCENARIO = Scenario(
    schedule=[
        malform("other_tp_size"),
        ask("wrong", prompt(64)),
        run(),
        faults_end(),
        ask("r", prompt(64, 1)),
        run(),
        expect_all_ended(),
    ],
    rule="LAB002",
    text="loaded up to 0 of 64",
    request="r-00000002",
    wrong={"vllm": ">=0.32"},
    options=Options(connector="nixl-pull"),
    needs={"vllm": ">=0.32"},
    not_in_hooks=REQUEST,
)
