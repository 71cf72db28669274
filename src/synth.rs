//! `hadron synth`: writes a checkpoint of deterministic random weights for any supported config.json.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use models::synth::{SynthDType, SynthOptions, write};

use crate::config::{DtypeArg, SynthArgs};
use crate::progress::{ProgressReporter, ProgressUnit};

/// Writes the checkpoint and prints the command that serves it.
pub fn run(args: &SynthArgs) -> Result<ExitCode> {
    let config =
        if args.config.is_dir() { args.config.join("config.json") } else { args.config.clone() };
    let out = args.out.display();
    if let Ok(mut entries) = std::fs::read_dir(&args.out)
        && entries.next().is_some()
    {
        bail!("{out}: not empty");
    }
    let dtype = match args.dtype {
        DtypeArg::Auto | DtypeArg::Bfloat16 => SynthDType::BF16,
        DtypeArg::Float32 => SynthDType::F32,
        DtypeArg::Float16 => SynthDType::F16,
    };
    let options = SynthOptions { seed: args.seed, dtype, ..SynthOptions::default() };
    let progress = ProgressReporter::new(&format!("write {out}"), 0, ProgressUnit::Bytes);
    write(&config, &args.out, &options, &mut |done, total| progress.set(done, total))
        .with_context(|| format!("synth {}", config.display()))?;
    progress.finish();
    writeln!(std::io::stdout(), "hadron serve {out}")?;
    Ok(ExitCode::SUCCESS)
}
