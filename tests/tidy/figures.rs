//! Checks published benchmark figures: every number in the README's table is in a committed result page, and
//! the medians in result pages follow from the listed runs.

use crate::source_tree::read_file;

/// A row of a Markdown table of benchmark figures.
#[derive(Debug, Clone, PartialEq)]
struct FigureTableRow {
    cells: Vec<String>,
}

/// Returns the rows of all tables in a page whose header starts with `| figure | median | range |`.
fn figure_rows(page: &str) -> Vec<FigureTableRow> {
    let mut rows = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        inside =
            line.starts_with('|') && (inside || line.starts_with("| figure | median | range |"));
        if inside {
            let cells = line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned());
            rows.push(FigureTableRow { cells: cells.collect() });
        }
    }
    rows.retain(|row| row.cells[0] != "figure" && !row.cells[0].starts_with("--"));
    rows
}

/// Returns the numbers in a text, with their digits as written.
pub(crate) fn numbers(text: &str) -> Vec<&str> {
    let of_number = |c: char| c.is_ascii_digit() || c == '.' || c == ',';
    let parts = text.split(|c: char| !of_number(c)).map(|part| part.trim_matches(['.', ',']));
    parts.filter(|part| !part.is_empty()).collect()
}

pub(crate) fn value(number: &str) -> f64 {
    number.replace(',', "").parse().unwrap_or_else(|_| panic!("{number}: not a number"))
}

/// Returns half a unit of the last digit of a number as written, which is the maximum rounding error.
pub(crate) fn half_unit(number: &str) -> f64 {
    let decimals = number.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    0.5 * 10_f64.powi(-(decimals as i32))
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { f64::midpoint(sorted[half - 1], sorted[half]) }
}

/// Compares a row in the README with the same row in the result page to which it links. Returns a message if
/// they differ.
fn quote_error(row: &FigureTableRow, page: &str) -> Option<String> {
    let figure = &row.cells[0];
    let source = figure_rows(page).into_iter().find(|other| other.cells[0] == *figure);
    let Some(source) = source else { return Some(format!("{figure}: no such row on its page")) };
    let (median, range, floor) = (&row.cells[1], &row.cells[2], &row.cells[4]);
    let quoted = [median, range, floor];
    let written = [&source.cells[1], &source.cells[2], &source.cells[5]];
    if quoted != written {
        return Some(format!("{figure}: {quoted:?} in the README, {written:?} on its page"));
    }
    let runs = source.cells[3].split(';').count();
    let runs = if source.cells[3].ends_with("rounds") {
        value(numbers(&source.cells[3])[0]) as usize
    } else {
        runs
    };
    (row.cells[3] != runs.to_string()).then(|| format!("{figure}: its page lists {runs} runs"))
}

/// Checks that median and range of a row in a result page follow from the listed runs, if runs are listed.
/// Returns a message if they do not.
fn runs_error(row: &FigureTableRow) -> Option<String> {
    let (figure, shown, range, runs) = (&row.cells[0], &row.cells[1], &row.cells[2], &row.cells[3]);
    if runs.ends_with("rounds") {
        return (range != "not recorded").then(|| format!("{figure}: a range without its runs"));
    }
    let values: Vec<f64> = runs.split(';').map(|run| value(run.trim())).collect();
    let near = |written: &str, expected: f64| {
        (value(written) - expected).abs() <= half_unit(written) * 1.000_001
    };
    if !near(shown, median(&values)) {
        return Some(format!("{figure}: {shown} is not the median of {runs}"));
    }
    if values.len() == 1 {
        return (range != "one run").then(|| format!("{figure}: one run has no range"));
    }
    let ends = range.split_once('–').filter(|(low, high)| {
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        near(low, least) && near(high, most)
    });
    ends.is_none().then(|| format!("{figure}: {range} is not the range of {runs}"))
}

/// Returns the paths of the result files to which a table cell links.
fn linked_result_files(cell: &str) -> Vec<&str> {
    let links = cell.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    links.filter(|path| path.starts_with("tests/bench/results/")).collect()
}

#[test]
fn readme_figures_match_committed_results() {
    let readme = read_file("README.md");
    let rows = figure_rows(&readme);
    assert!(rows.len() >= 10, "the README publishes figures: {}", rows.len());
    let faults: Vec<String> = rows
        .iter()
        .filter_map(|row| match linked_result_files(row.cells.last().unwrap())[..] {
            [page] => quote_error(row, &read_file(page)),
            _ => Some(format!("{}: one link to a result page", row.cells[0])),
        })
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let (_, section) = readme.split_once("## Figures").unwrap();
    let tables = section.lines().filter(|line| line.starts_with('|')).count();
    assert_eq!(tables, rows.len() + 2, "every table of figures is of the kind that is checked");
}

#[test]
fn result_page_medians_match_their_runs() {
    for page in ["h200/serving.md", "h200/ranks.md"] {
        let rows = figure_rows(&read_file(&format!("tests/bench/results/{page}")));
        assert!(!rows.is_empty(), "{page}");
        let faults: Vec<String> = rows.iter().filter_map(runs_error).collect();
        assert!(faults.is_empty(), "{page}: {}", faults.join("\n"));
    }
}

/// Each raw measurement in a committed `.jsonl` file, rounded, is listed among the runs of its row in the
/// result page.
#[test]
fn committed_raw_lines_are_among_the_runs() {
    let rows = figure_rows(&read_file("tests/bench/results/h200/serving.md"));
    let raw = [
        ("qwen3-0.6b", "Qwen3-0.6B"),
        ("qwen3-8b", "Qwen3-8B"),
        ("qwen3-30b-a3b", "Qwen3-30B-A3B"),
        ("qwen3-30b-a3b-fp8", "Qwen3-30B-A3B FP8"),
    ];
    for (file, model) in raw {
        for line in read_file(&format!("tests/bench/results/h200/{file}.jsonl")).lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            let requests = line["conc"].as_u64().unwrap();
            let (figure, key) = match requests {
                1 => (format!("{model}, 1 request: ms per token"), "tpot_ms_p50"),
                _ => (format!("{model}, {requests} requests: output tok/s"), "out_tok_s"),
            };
            let Some(row) = rows.iter().find(|row| row.cells[0] == figure) else {
                panic!("{figure}: {file}.jsonl has it, serving.md does not");
            };
            let measured = line[key].as_f64().unwrap();
            let is_it = |run: &str| (value(run) - measured).abs() <= half_unit(run) * 1.02;
            let found = row.cells[3].split(';').any(|run| is_it(run.trim()));
            assert!(found, "{figure}: {measured} is not among {}", row.cells[3]);
        }
    }
}

#[test]
fn edited_figures_are_detected() {
    let readme = read_file("README.md");
    let rows = figure_rows(&readme);
    for row in &rows {
        let page = read_file(linked_result_files(row.cells.last().unwrap())[0]);
        for cell in 1..5 {
            for number in numbers(&row.cells[cell]) {
                let mut edited = row.clone();
                let last = number.len() - 1;
                let digit = (number.as_bytes()[last] - b'0' + 1) % 10;
                let other = format!("{}{digit}", &number[..last]);
                edited.cells[cell] = edited.cells[cell].replacen(number, &other, 1);
                assert!(quote_error(&edited, &page).is_some(), "{edited:?} passes");
            }
        }
    }
    let run = |shown: &str, range: &str| {
        let cells = ["a", shown, range, "1.0; 3.0; 2.4"].map(str::to_owned).to_vec();
        runs_error(&FigureTableRow { cells })
    };
    assert!(run("2.4", "1.0–3.0").is_none());
    assert!(run("2.5", "1.0–3.0").is_some() && run("2.4", "1.1–3.0").is_some());
}

#[test]
fn the_readme_is_short_before_its_figures() {
    let readme = read_file("README.md");
    let (before, _) = readme.split_once("## Figures").unwrap();
    let words = before.split_whitespace().count();
    assert!(words <= 400, "{words} words before the figures");
}
