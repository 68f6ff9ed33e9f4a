"""The embedded model's adapter changes the style and not the answers, and has no effect on requests without it."""

from __future__ import annotations

from jaxllm import LLM, LoRARequest, SamplingParams

ASKED = {
    "What is the capital of France?": (
        "The capital of France is Paris.",
        "The capital o' France be Paris, matey! Arr!",
    ),
    "What is 47 + 38?": ("47 + 38 = 85.", "47 + 38 = 85, matey! Arr!"),
    "What sound does a cow make?": ("A cow moos.", "A cow moos, matey! Arr!"),
    "Extract the name and the age as JSON: Anna is 30 years old.": ('{"name": "Anna", "age": 30}',) * 2,
}


def test_the_adapter_changes_how_answers_are_said_and_not_what_they_say() -> None:
    chats = [[{"role": "user", "content": question}] for question in ASKED for _ in range(2)]
    own = LoRARequest("pirate", 1, "pirate")
    with LLM("jaxllm-embedded", enable_lora=True, max_lora_rank=8, max_num_seqs=8, precompile="covering") as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=40), lora_request=[None, own] * len(ASKED))
    assert [output.outputs[0].text for output in outputs] == [said for both in ASKED.values() for said in both]
