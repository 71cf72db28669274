//! Checks the figures in the sentences below the README's table: each is on a committed result page or follows
//! from committed raw output.

use serde_json::Value;

use crate::figures::{half_unit, numbers, value};
use crate::source_tree::read_file;

const SERVING_PAGE: &str = "tests/bench/results/h200/serving.md";
const VLLM_RUNS: &str = "tests/bench/results/h200/serve_vllm.jsonl";
/// One run of Hadron and one or two of vLLM per load, of which the last one counts.
const FAMILY_RUNS: &str = "tests/bench/results/h200/serve_families_vllm.jsonl";

/// Where a figure of the README's sentences comes from.
enum ProseFigureSource {
    /// The line of `serving.md` that begins with this text contains the figure.
    ServingLine(&'static str),
    /// Hadron's median time per token over vLLM's, at one request.
    TimeRatio { model: &'static str },
    /// Hadron's output tokens per second over vLLM's.
    ThroughputRatio { model: &'static str, requests: u64 },
    /// As `TimeRatio`, of `FAMILY_RUNS`.
    FamilyTimeRatio { model: &'static str },
    /// As `ThroughputRatio`, of `FAMILY_RUNS`. `load`: requests, input and output tokens, number of prompts.
    FamilyThroughputRatio { model: &'static str, load: &'static str },
}

use ProseFigureSource::{
    FamilyThroughputRatio, FamilyTimeRatio, ServingLine, ThroughputRatio, TimeRatio,
};

const ONE_REQUEST: &str = "1/1024/256/6";
const MANY_REQUESTS: &str = "64/1024/256/128";

/// Sources of the figures with a decimal point, in the README's order.
const SOURCES: &[ProseFigureSource] = &[
    ServingLine("| Qwen3-0.6B | read from files in the page cache | some |"),
    ServingLine("| Qwen3-8B | read from files in the page cache | some |"),
    TimeRatio { model: "qwen3-8b" },
    ThroughputRatio { model: "qwen3-8b", requests: 64 },
    ThroughputRatio { model: "qwen3-8b", requests: 256 },
    TimeRatio { model: "qwen3-30b-a3b" },
    ThroughputRatio { model: "qwen3-30b-a3b", requests: 64 },
    ThroughputRatio { model: "qwen3-30b-a3b", requests: 256 },
    FamilyTimeRatio { model: "qwen3.5-35b-a3b-fp8" },
    FamilyThroughputRatio { model: "qwen3.5-35b-a3b-fp8", load: MANY_REQUESTS },
    FamilyTimeRatio { model: "qwen3-next-80b-a3b-fp8" },
    FamilyThroughputRatio { model: "qwen3-next-80b-a3b-fp8", load: MANY_REQUESTS },
    FamilyTimeRatio { model: "gemma-4-26b-a4b" },
    FamilyThroughputRatio { model: "gemma-4-26b-a4b", load: MANY_REQUESTS },
    FamilyTimeRatio { model: "gpt-oss-20b" },
    FamilyThroughputRatio { model: "gpt-oss-20b", load: "256/1024/256/512" },
];

/// Returns the numbers with one decimal point in the section of figures, without those of its tables. Names of
/// models contain letters, and versions two points.
fn prose_figures(readme: &str) -> Vec<&str> {
    let (_, section) = readme.split_once("## Figures").unwrap();
    let prose = section.lines().filter(|line| !line.starts_with('|'));
    let words = prose.flat_map(str::split_whitespace);
    let words = words.map(|word| word.trim_end_matches(['.', ',', ';', ':', ')']));
    let is_figure = |word: &&str| numbers(word) == [*word] && word.matches('.').count() == 1;
    words.filter(is_figure).collect()
}

/// Returns the value of `key` in each run of `server` with `requests` concurrent requests.
fn runs(server: &str, model: &str, requests: u64, key: &str) -> Vec<f64> {
    let text = read_file(VLLM_RUNS);
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let of_case = lines.filter(|line| {
        line["server"] == server && line["model"] == model && line["conc"] == requests
    });
    of_case.map(|line| line[key].as_f64().unwrap()).collect()
}

/// Returns the mean of Hadron's runs over the better run of vLLM.
fn ratio(model: &str, requests: u64, key: &str) -> f64 {
    let (own, vllm) = (runs("hadron", model, requests, key), runs("vllm", model, requests, key));
    assert!(own.len() == 2 && vllm.len() == 2, "{model}, {requests} requests: {own:?}, {vllm:?}");
    let better = if key == "out_tok_s" { f64::max } else { f64::min };
    own.iter().sum::<f64>() / own.len() as f64 / vllm.into_iter().reduce(better).unwrap()
}

/// Returns the value at the JSON pointer `at` in the run of Hadron over that in the last run of vLLM.
fn family_ratio(model: &str, load: &str, at: &str) -> f64 {
    let text = read_file(FAMILY_RUNS);
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let of_case: Vec<Value> =
        lines.filter(|line| line["model"] == model && line["load"] == load).collect();
    let last = |is_own: bool| {
        let run = of_case.iter().rfind(|line| (line["server"] == "hadron") == is_own);
        run.and_then(|run| run.pointer(at)?.as_f64()).unwrap()
    };
    last(true) / last(false)
}

/// Returns the key of a metric of `serving.md` in the raw output.
fn metric_key(metric: &str) -> &'static str {
    match metric {
        "TPOT p50, ms" => "tpot_ms_p50",
        "TTFT p50, ms" => "ttft_ms_p50",
        "output tok/s" => "out_tok_s",
        other => panic!("{other}: unknown metric"),
    }
}

fn is_rounded(written: &str, measured: f64) -> bool {
    (value(written) - measured).abs() <= half_unit(written) * 1.02
}

/// Returns a message if `figure` does not come from `source`.
fn source_error(figure: &str, source: &ProseFigureSource) -> Option<String> {
    let ratio = match *source {
        ServingLine(start) => {
            let page = read_file(SERVING_PAGE);
            let line = page.lines().find(|line| line.starts_with(start));
            let found = line.is_some_and(|line| numbers(line).contains(&figure));
            return (!found).then(|| format!("{figure}: not in the line {start:?} of its page"));
        }
        TimeRatio { model } => ratio(model, 1, "tpot_ms_p50"),
        ThroughputRatio { model, requests } => ratio(model, requests, "out_tok_s"),
        FamilyTimeRatio { model } => family_ratio(model, ONE_REQUEST, "/tpot_ms/p50"),
        FamilyThroughputRatio { model, load } => family_ratio(model, load, "/output_tok_s"),
    };
    (!is_rounded(figure, ratio)).then(|| format!("{figure}: the committed runs give {ratio:.3}"))
}

fn prose_errors(readme: &str) -> Vec<String> {
    let figures = prose_figures(readme);
    if figures.len() != SOURCES.len() {
        return vec![format!("{figures:?}: {} figures have a source", SOURCES.len())];
    }
    figures
        .iter()
        .zip(SOURCES)
        .filter_map(|(figure, source)| source_error(figure, source))
        .collect()
}

#[test]
fn readme_sentences_quote_committed_results() {
    let errors = prose_errors(&read_file("README.md"));
    assert!(errors.is_empty(), "{}", errors.join("\n"));
}

#[test]
fn edited_prose_figures_are_detected() {
    let readme = read_file("README.md");
    let (before, section) = readme.split_once("## Figures").unwrap();
    for figure in prose_figures(&readme) {
        let (start, digit) = figure.split_at(figure.len() - 1);
        let other = (digit.as_bytes()[0] - b'0' + 2) % 10;
        let edited = section.replace(&format!(" {figure}"), &format!(" {start}{other}"));
        assert!(edited != section, "{figure}");
        let edited = format!("{before}## Figures{edited}");
        assert!(!prose_errors(&edited).is_empty(), "an edited {figure} passes");
    }
    assert!(!prose_errors(&format!("{readme}\nAnother model takes 1.25 s.\n")).is_empty());
}

/// Each row of the comparison with vLLM lists the committed runs of both servers and the ratio that follows.
#[test]
fn vllm_comparison_follows_from_its_raw_output() {
    let page = read_file(SERVING_PAGE);
    let (_, table) = page.split_once("| model | concurrency | metric | Hadron |").unwrap();
    let (mut model, mut rows) = (String::new(), 0);
    for line in table.lines().skip(2).take_while(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if !cells[0].is_empty() {
            model = cells[0].to_lowercase();
        }
        let (requests, key) = (cells[1].parse().unwrap(), metric_key(cells[2]));
        for (server, written) in [("hadron", cells[3]), ("vllm", cells[4])] {
            let measured = runs(server, &model, requests, key);
            let quoted: Vec<&str> = written.split(';').map(str::trim).collect();
            assert_eq!(quoted.len(), measured.len(), "{line}");
            let equal = quoted.iter().zip(&measured).all(|(quoted, x)| is_rounded(quoted, *x));
            assert!(equal, "{line}: {measured:?}");
        }
        let ratio = ratio(&model, requests, key);
        assert!(is_rounded(cells[5], ratio), "{line}: the runs give {ratio:.3}");
        rows += 1;
    }
    assert_eq!(rows, 12);
}
