//! Spellings of flags: names that are rewritten, and names that are similar to a mistyped one.

/// Spellings that clap does not support, such as short names with several letters, and their replacements.
const REWRITES: &[(&str, &str)] = &[
    ("-tp", "--tensor-parallel-size"),
    ("-dp", "--data-parallel-size"),
    ("-pp", "--pipeline-parallel-size"),
    ("-dcp", "--decode-context-parallel-size"),
    ("-pcp", "--prefill-context-parallel-size"),
    ("-ep", "--enable-expert-parallel"),
    ("-n", "--nnodes"),
    ("-r", "--node-rank"),
    ("-dpn", "--data-parallel-rank"),
    ("-dpr", "--data-parallel-start-rank"),
    ("-dpl", "--data-parallel-size-local"),
    ("-dpa", "--data-parallel-address"),
    ("-dpp", "--data-parallel-rpc-port"),
    ("-dpb", "--data-parallel-backend"),
    ("-dph", "--data-parallel-hybrid-lb"),
    ("-dpe", "--data-parallel-external-lb"),
    ("-dpm", "--data-parallel-multi-port-external-lb"),
    ("-asc", "--api-server-count"),
    ("-q", "--quantization"),
    ("-sc", "--speculative-config"),
    ("-cc", "--compilation-config"),
    ("-ac", "--attention-config"),
    ("-dc", "--diffusion-config"),
    ("-O", "--optimization-level"),
];

/// Switches of other engines that set a flag of Hadron: name of the switch, its replacement if it is on, and
/// its replacement if it is off.
const SWITCH_REWRITES: &[(&str, &str, &str)] = &[
    ("disable-log-requests", "--enable-log-requests=false", "--enable-log-requests=true"),
    ("disable-radix-cache", "--enable-prefix-caching=false", "--enable-prefix-caching=true"),
    ("load-dummy", "--load-format=synth", "--load-format=auto"),
];

/// Converts the flag name in a word to kebab case, and replaces spellings and switches that are in `REWRITES`
/// or `SWITCH_REWRITES`. The value is unchanged.
pub(super) fn canonical_spelling(word: &str) -> String {
    let (name, value) = word.split_once('=').map_or((word, None), |(n, v)| (n, Some(v)));
    let name = if name.starts_with("--") { name.replace('_', "-") } else { name.to_owned() };
    if let Some(word) = switch_rewrite(&name, value) {
        return word.to_owned();
    }
    let level = name.strip_prefix("-O").filter(|level| level.parse::<u8>().is_ok());
    if let Some(level) = level {
        return format!("--optimization-level={level}");
    }
    let rewritten = REWRITES.iter().find(|(from, _)| *from == name).map(|(_, to)| (*to).to_owned());
    let name = rewritten.unwrap_or(name);
    match value {
        Some(value) => format!("{name}={value}"),
        None => name,
    }
}

/// Returns the replacement for a switch in `SWITCH_REWRITES`.
fn switch_rewrite(name: &str, value: Option<&str>) -> Option<&'static str> {
    let name = name.strip_prefix("--")?;
    let positive_name = name.strip_prefix("no-").unwrap_or(name);
    let (_, on, off) = SWITCH_REWRITES.iter().find(|(switch, ..)| *switch == positive_name)?;
    match (name == positive_name, value) {
        (true, None | Some("true")) => Some(on),
        (true, Some("false")) | (false, None) => Some(off),
        _ => None,
    }
}

/// Returns the number of inserted, deleted and replaced bytes between two names (Levenshtein).
pub(super) fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
