"""Generate answers to a dataset of prompts with Ray Data, on several engines, and write them as Parquet.

    pip install 'jaxllm[ray]'
    python examples/ray_batch.py prompts.jsonl answers/ --actors 4 --gpus 1 --model Qwen/Qwen2.5-0.5B-Instruct

The input is Parquet, JSON lines or CSV with a column of prompts and a column of unique ids; each row of the output has
the additional columns "text", "finish_reason" and "num_tokens". After a failure, run the same command again: it skips
rows whose answers are in the folder.

Each actor writes the answers of a batch to a temporary file, and renames it when it is complete. Therefore, if the job,
an actor or a node is killed, the next run repeats only prompts without a written answer. Checkpoints of Ray Data would
lose answers that have not reached its writer. All nodes must share the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray

from jaxllm import LLM, SamplingParams


class Generate:
    """One engine in an actor: generates the answers to a batch and writes them."""

    def __init__(self, folder: str, columns: tuple[str, str], engine: dict[str, Any], sampling: dict[str, Any]) -> None:
        self._folder = Path(folder)
        self._id, self._prompt = columns
        self._params = SamplingParams(**sampling)
        self._llm = LLM(**engine)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the number of new answers: 0 if the batch is complete, and Ray repeats it because an actor died."""
        ids = batch[self._id].to_pylist()
        path = self._folder / f"{hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:32]}.parquet"
        if not ids or path.exists():
            return pa.table({"made": [0]})
        outputs = self._llm.generate(batch[self._prompt].to_pylist(), self._params, use_tqdm=False)
        made = [output.outputs[0] for output in outputs]
        for name, values in (
            ("text", [each.text for each in made]),
            ("finish_reason", [each.finish_reason for each in made]),
            ("num_tokens", [len(each.token_ids) for each in made]),
        ):
            batch = batch.append_column(name, pa.array(values))
        part = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
        pq.write_table(batch, part)
        os.replace(part, path)  # atomic: a file with this name is complete
        return pa.table({"made": [len(ids)]})


def ids_in(folder: Path, column: str) -> pa.ChunkedArray | pa.Array:
    """Return the ids of the answers in the folder."""
    parts = [pq.read_table(path, columns=[column])[column] for path in sorted(folder.glob("*.parquet"))]
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks]) if parts else pa.array([])


def run(options: argparse.Namespace) -> tuple[int, int]:
    """Generate the missing answers of a job; return the numbers of earlier and of new answers."""
    read = {".parquet": ray.data.read_parquet, ".csv": ray.data.read_csv}.get(options.input.suffix, ray.data.read_json)
    rows = read(str(options.input.absolute()), **({"lines": True} if options.input.suffix == ".jsonl" else {}))
    missing = {options.id_column, options.prompt_column} - set(rows.columns() or ())
    if missing:
        raise SystemExit(f"{options.input} has no column {min(missing)!r}; see --id-column and --prompt-column")
    options.output.mkdir(parents=True, exist_ok=True)
    done = ids_in(options.output, options.id_column)
    if len(done):
        column = options.id_column

        def left(table: pa.Table) -> pa.Table:
            return table.filter(pc.invert(pc.is_in(table[column], value_set=done)))

        rows = rows.map_batches(left, batch_format="pyarrow")
    made = rows.map_batches(
        Generate,
        fn_constructor_args=(
            str(options.output.absolute()),
            (options.id_column, options.prompt_column),
            {"model": options.model, **options.engine},
            options.sampling,
        ),
        batch_size=options.batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=options.actors),
        num_cpus=options.cpus,
        num_gpus=options.gpus,
    )
    return len(done), made.sum("made") or 0


def main() -> None:
    """Read the command line and run the job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("input", type=Path, help="file of prompts: *.parquet, *.jsonl or *.csv")
    parser.add_argument("output", type=Path, help="folder for the answers")
    parser.add_argument("--model", help="folder or hub id (default: the small model in jaxllm)")
    parser.add_argument("--id-column", default="id", help="column of unique ids (default: id)")
    parser.add_argument("--prompt-column", default="prompt", help="column of prompts (default: prompt)")
    parser.add_argument("--actors", type=int, default=1, help="number of engines (default: 1)")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs per engine (default: 1)")
    parser.add_argument(
        "--gpus", type=float, default=0, help="GPUs per engine, as many as its tensor_parallel_size (default: 0)"
    )
    parser.add_argument("--batch-size", type=int, default=256, help="prompts per file of answers (default: 256)")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON object: further fields of EngineConfig")
    parser.add_argument("--sampling", type=json.loads, default={}, help="JSON object: fields of SamplingParams")
    parser.add_argument("--address", help="address of a Ray cluster (default: a running one, or a new one)")
    options = parser.parse_args()
    ray.init(address=options.address, log_to_driver=False)
    before, made = run(options)
    print(f"{before} answers existed, {made} were generated")


if __name__ == "__main__":
    main()
