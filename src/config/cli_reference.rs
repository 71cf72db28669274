//! Generates `docs/cli.md` from the clap structs, so that the page matches the flags.

use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory as _};

use super::CliArgs;
use super::compat_flags::{INERT_FLAGS, NO_OP_VALUES, UNSUPPORTED_FLAGS};

/// Returns the path of `docs/cli.md` relative to the repository root.
pub fn reference_path() -> &'static str {
    "docs/cli.md"
}

/// Returns the text of `docs/cli.md`.
pub fn reference() -> String {
    let mut out = String::from(
        "# Command line\n\nTL;DR: `hadron serve MODEL` serves a model folder or a hub id on \
         127.0.0.1:8000. This page is generated from the flag table; a test checks it.\n\n\
         Names may be written with dashes or underscores. `--no-X` disables a boolean flag. Order \
         of precedence: flag, `--config FILE.toml` (same names), environment, default. Exit codes: \
         0 clean shutdown, 1 configuration or start-up failure, 2 usage error, 3 fatal error at run time.\n",
    );
    let mut root = CliArgs::command();
    root.build();
    for command in root.get_subcommands().filter(|command| !command.is_hide_set()) {
        command_section(&mut out, "hadron", command);
    }
    environment_section(&mut out);
    compat_flags_section(&mut out);
    out
}

fn command_section(out: &mut String, parent: &str, command: &Command) {
    let name = format!("{parent} {}", command.get_name());
    if command.has_subcommands() {
        for sub in command.get_subcommands() {
            command_section(out, &name, sub);
        }
        return;
    }
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let _infallible = writeln!(out, "\n## `{name}`\n\n{about}.");
    let mut heading = None;
    let positionals = command.get_positionals();
    let flags = command.get_arguments().filter(|flag| !flag.is_positional());
    let flags = flags.filter(|flag| !matches!(flag.get_id().as_str(), "help"));
    for (index, arg) in positionals.chain(flags).filter(|arg| !arg.is_hide_set()).enumerate() {
        let group = arg.get_help_heading().unwrap_or_default();
        if index == 0 || (heading != Some(group) && arg.get_long().is_some()) {
            let title = if group.is_empty() { String::new() } else { format!("**{group}**\n\n") };
            let _infallible = writeln!(out, "\n{title}| flag | default | meaning |\n|---|---|---|");
            heading = Some(group);
        }
        flag_row(out, arg);
    }
}

fn flag_row(out: &mut String, arg: &Arg) {
    let value = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    let boolean = arg.is_require_equals_set() || !arg.get_action().takes_values();
    let mut names = match arg.get_long() {
        Some(long) if boolean => format!("`--{long}`"),
        Some(long) => format!("`--{long} {}`", value.unwrap_or_default()),
        None => format!("`{}`", value.unwrap_or_default()),
    };
    let aliases: Vec<String> =
        arg.get_all_aliases().unwrap_or_default().iter().map(|a| format!("`--{a}`")).collect();
    if !aliases.is_empty() {
        let _infallible = write!(names, " ({})", aliases.join(", "));
    }
    let default: Vec<String> =
        arg.get_default_values().iter().map(|v| v.to_string_lossy().into_owned()).collect();
    let default = match default.join(",").as_str() {
        "true" if boolean => "on".to_owned(),
        "false" if boolean => "off".to_owned(),
        other => other.to_owned(),
    };
    let mut help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let choices: Vec<String> =
        arg.get_possible_values().iter().map(|v| v.get_name().to_owned()).collect();
    if !choices.is_empty() && !boolean {
        let _infallible = write!(help, " ({})", choices.join(", "));
    }
    let _infallible = writeln!(out, "| {names} | {default} | {} |", help.replace('|', "\\|"));
}

fn environment_section(out: &mut String) {
    out.push_str(
        "\n## Environment\n\n| variable | meaning |\n|---|---|\n\
         | `HF_HOME`, `HF_HUB_CACHE` | cache folder of downloads |\n\
         | `HF_ENDPOINT` | URL of the hub, instead of https://huggingface.co |\n\
         | `HF_TOKEN` | access token of the hub (else the file `token` in `HF_HOME`) |\n\
         | `HF_HUB_OFFLINE` | 1: use cached files only, without requests to the hub |\n\
         | `HADRON_API_KEY`, `VLLM_API_KEY` | API key of clients and, without `--api-key`, of the server |\n\
         | `HADRON_CLUSTER_SECRET` | cluster secret, without `--cluster-secret-file` |\n\
         | `LWS_*`, `SLURM_*`, `OMPI_COMM_WORLD_*`, `PMI_*`, `PMIX_RANK`, `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, \
         `RANK`, `GROUP_RANK` | number of nodes, index of this node and address of node 0, unless set by flags \
         (`docs/multi-node.md`) |\n\
         | `XDG_CACHE_HOME` | compiled kernels are cached in its folder `hadron` (default `~/.cache`) |\n\
         | `ROCM_PATH` | folder of the ROCm installation (default `/opt/rocm*`) |\n\
         | `HIP_VISIBLE_DEVICES`, `ROCR_VISIBLE_DEVICES`, `CUDA_VISIBLE_DEVICES` | GPUs that the driver lists; `--device-ids` \
         counts among these (`docs/operations.md`) |\n\
         | `RUST_LOG` | log filter |\n",
    );
}

fn compat_flags_section(out: &mut String) {
    out.push_str("\n## Flags of other engines\n\nAccepted by `serve` without effect:\n\n");
    out.push_str("| flag | reason |\n|---|---|\n");
    for flag in INERT_FLAGS {
        let _infallible = writeln!(out, "| `--{}` | {} |", flag.name, flag.reason);
    }
    out.push_str("\nAccepted with these values, which are the built-in behaviour, and rejected with others:\n\n");
    out.push_str("| flag | values |\n|---|---|\n");
    for (flag, values) in NO_OP_VALUES {
        let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
        let _infallible = writeln!(out, "| `--{flag}` | {} |", values.join(", "));
    }
    out.push_str("\nRejected with the reason; disabling one of them has no effect:\n\n");
    out.push_str("| flags | reason |\n|---|---|\n");
    for entry in UNSUPPORTED_FLAGS {
        let names: Vec<String> = entry.names().map(|name| format!("`--{name}`")).collect();
        let _infallible = writeln!(out, "| {} | {} |", names.join(", "), entry.reason);
    }
}
