"""What the documents say of speed: a local swarm and one engine beside ``transformers``."""

from typing import Any

from bench.report import made, table


def speed(result: dict[str, Any]) -> str:
    """A local swarm beside one process."""
    where = f"{result['cores']} cores ({result['cpu']}), torch {result['torch']}"
    return (
        f"All peers share one machine of {where}; the single process, `transformers.generate` in"
        " float32, has it to itself. Models are named by hidden size × layers, with random weights;"
        f" ratios are to one stream of the single process {made('local')}:\n\n"
    ) + table(
        "model | peers | one process, tokens/s | swarm, tokens/s | ratio | 4 streams, total"
        " | 8 streams, total | TTFT of 512 tokens",
        "{model} | {peers} | {single[tokens_per_s]:.1f} | {swarm[tokens_per_s]:.1f}"
        " | {ratio[one_stream]:.2f} | {ratio[four_streams]:.2f}× | {ratio[eight_streams]:.2f}×"
        " | {swarm[ttft_512_s]:.2f} s ({ratio[ttft_512]:.2f}×)",
        [
            {"model": model, "peers": peers, **figures["median"]}
            for model, by_peers in result["models"].items()
            for peers, figures in by_peers.items()
        ],
    )


def real_sizes(result: dict[str, Any]) -> str:
    """Models of real sizes on a processor."""
    every = [row for found in result["models"].values() for row in found["weights"].values()]
    bytes_per_s, flops_per_s = (
        max(row[key] for row in every) / 1e9 for key in ("bytes_per_s", "flops_per_s")
    )
    by_rows = {
        "rate": ("tokens_per_s", None),
        "times": ("times_floor", bytes_per_s),
        "step": ("engine_step_ms", None),
        "step_times": ("engine_times_floor", bytes_per_s),
    }
    rows = [
        {
            "model": f"{model}, {found['layers']} of {found['of_layers']} layers",
            "weights": weights,
            **figures,
            "ttft_512_times_floor": figures["ttft_512_times_floor"]
            * (flops_per_s * 1e9 / figures["flops_per_s"]),
            **{
                short: {
                    int(rows): figure * (highest * 1e9 / figures["bytes_per_s"] if highest else 1)
                    for rows, figure in figures[key].items()
                }
                for short, (key, highest) in by_rows.items()
            },
        }
        for model, found in result["models"].items()
        for weights, figures in found["weights"].items()
        if "unavailable" not in figures
    ]
    return (
        "Models of real sizes with random weights, computed in bfloat16: a step of one engine with"
        " all layers, alone, and three peers that share the cores and the memory of one machine, of"
        f" {result['cores']} cores ({result['cpu']}), which reads up to {bytes_per_s:.1f} GB/s"
        f" and multiplies up to {flops_per_s:.0f} GFLOP/s in bfloat16. A step's floor is what"
        " it must read of the weights over the former (of experts, those that its rows choose); a"
        " prompt's is its products over the latter, both by the highest rate that was measured for"
        " any row; memory is of all three peers with their"
        f" libraries; drafts and kept prefixes are off {made('real_sizes')}.{_note(result)}"
        "\n\n"
    ) + table(
        "model | weights | GiB of weights | engine's step of 1, 4, 8 rows, ms | times its floor"
        " | three peers' memory, GiB | serving after, s | TTFT of 512, s | times its floor"
        " | tokens/s of 1, 4, 8 answers | times their floor",
        "{model} | {weights} | {weights_gib:.1f} | {step[1]:.0f}, {step[4]:.0f}, {step[8]:.0f}"
        " | {step_times[1]:.2f}, {step_times[4]:.2f}, {step_times[8]:.2f}"
        " | {memory_gib:.1f} | {serving_s:.0f}"
        " | {ttft_512_s:.1f} | {ttft_512_times_floor:.1f} | {rate[1]:.1f}, {rate[4]:.1f},"
        " {rate[8]:.1f} | {times[1]:.2f}, {times[4]:.2f}, {times[8]:.2f}",
        rows,
    )


def _note(result: dict[str, Any]) -> str:
    return f" {result['note']}" if "note" in result else ""


def beside_llama_cpp(result: dict[str, Any]) -> str:
    """One GGUF file by this engine and by llama.cpp."""
    rows = [
        {"model": f"{model}, {found['layers']} of {found['of_layers']} layers", "kind": kind}
        | figures
        | {
            "ours": figures["anabranch"],
            "theirs": figures["llama.cpp"],
            "decode": list(figures["decode_of_llama_cpp"].values()),
        }
        for model, found in result["models"].items()
        for kind, figures in found.items()
        if isinstance(figures, dict) and "decode_of_llama_cpp" in figures
    ]
    return (
        f"The same GGUF files of random weights by one engine and by llama.cpp (of"
        f" `llama-cpp-python` {result['llama_cpp']}, built on this machine), alone and with all"
        f" {result['cores']} cores ({result['cpu']}), in turns; medians {made('llama_cpp')}."
        " llama.cpp rounds activations to 8 bits for Q8_0 and Q4_K and multiplies whole numbers;"
        f" this engine keeps them in bfloat16.{_note(result)}\n\n"
    ) + table(
        "model | file | prompt of 512, tokens/s | llama.cpp's | ratio"
        " | decode of 1, 4, 8 rows, tokens/s | llama.cpp's | ratios",
        "{model} | {kind} | {ours[prompt_tokens_per_s]:.0f} | {theirs[prompt_tokens_per_s]:.0f}"
        " | {prompt_of_llama_cpp:.2f} | {ours[tokens_per_s][1]:.1f}, {ours[tokens_per_s][4]:.1f},"
        " {ours[tokens_per_s][8]:.1f} | {theirs[tokens_per_s][1]:.1f},"
        " {theirs[tokens_per_s][4]:.1f}, {theirs[tokens_per_s][8]:.1f}"
        " | {decode[0]:.2f}, {decode[1]:.2f}, {decode[2]:.2f}",
        [
            row
            | {
                by: {
                    **row[by],
                    "tokens_per_s": {int(n): r for n, r in row[by]["tokens_per_s"].items()},
                }
                for by in ("ours", "theirs")
            }
            for row in rows
        ],
    )


def cost(result: dict[str, Any]) -> str:
    """What an idle peer costs."""
    idle, seconds, ask = result["idle_peer"], result["seconds_to_median"], result["ask"]
    torch = "with" if any(each["torch"] for each in ask["rounds"]) else "without"
    return (
        f"An idle peer of the bundled model is {idle['processes']} processes and"
        f" {idle['pss_mib']:.0f} MiB (PSS); a peer that returns serves"
        f" {seconds['serving']:.1f} s after its command; `anabranch ask` sends its request"
        f" {ask['request_s_median']:.2f} s after its own, {torch} torch in memory"
        f" {made('footprint')}."
    )


def schemas(result: dict[str, Any]) -> str:
    """Answers by random JSON schemas."""
    cut = f", {result['cut']} reached their most tokens" if result["cut"] else ""
    refused = f", {result['refused']} were refused by name" if result["refused"] else ""
    return (
        f"{result['schemas']} random JSON schemas, each answered once by a gateway before two real"
        f" peers of brook, which knows no JSON: {result['valid']} answers validate,"
        f" {result['invalid']} do not{cut}{refused}. Of {result['plain_answers']} plain greedy"
        f" answers between them {result['plain_that_differ']} differed from transformers' own"
        f" {made('schemas')}."
    )


def engine(result: dict[str, Any]) -> str:
    """One engine beside transformers."""
    if "seconds" in result:
        told = f"By {result['seconds']}, while others used the machine (`{result['command']}`)"
    else:
        told = (
            "One engine with all layers beside `transformers` in the same process: `generate` for"
            " one and for eight streams and for a prompt of 512, continuous batching for requests"
            " of mixed lengths; ratios are medians of rounds that alternate, with their quartiles"
            f" where they are known; the engine as of {result['commit']}; the floor is the weights'"
            " bytes over the measured memory bandwidth, the products are the same matrices in a"
            f" bare loop {made('engine')}"
        )
    return f"{told}:\n\n" + table(
        "model | measured | engine, tokens/s | transformers, tokens/s | ratio | times the floor"
        " | times its products alone",
        "{model} | {name} | {engine:.0f} | {transformers:.0f} | {ratio:.2f}{spread}"
        " | {times_floor:.1f} | {times_products:.1f}",
        [
            {"model": model, "name": name.replace("_", " "), "spread": _spread(one), **one}
            for model, figures in result["models"].items()
            for name, one in figures.items()
            if isinstance(one, dict)
        ],
    )


def _spread(one: dict[str, Any]) -> str:
    return " ({} to {})".format(*one["ratio_quartiles"]) if "ratio_quartiles" in one else ""
