//! Tests of the selection of a pooling method.

use super::*;
use crate::launcher::demo_model::UnpackedDemoModel;
use serde_json::json;

const ARGS: PoolingArgs =
    PoolingArgs { runner: RunnerArg::Auto, convert: ConvertArg::Auto, pooler_config: None };

/// A folder with `modules.json` and, if `mode` is given, the configuration of its pooling module.
fn folder(mode: Option<&str>, modules: &[&str]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let module = |name: &&str| json!({"path": format!("1_{name}"), "type": format!("sentence_transformers.models.{name}")});
    let list: Vec<Value> = modules.iter().map(module).collect();
    fs::write(dir.path().join(MODULES), json!(list).to_string()).unwrap();
    if let Some(mode) = mode {
        fs::create_dir(dir.path().join("1_Pooling")).unwrap();
        let text =
            json!({"word_embedding_dimension": 8, "pooling_mode_cls_token": false, mode: true});
        fs::write(dir.path().join("1_Pooling/config.json"), text.to_string()).unwrap();
    }
    dir
}

fn demo_config() -> ModelConfig {
    ModelConfig::from_dir(UnpackedDemoModel::new().unwrap().dir()).unwrap()
}

#[test]
fn sentence_transformers_folder_selects_pooling() {
    let config = demo_config();
    let mean = folder(Some("pooling_mode_mean_tokens"), &["Transformer", "Pooling"]);
    let found = plan(&ARGS, mean.path(), &config).unwrap().unwrap();
    assert_eq!((found.pooling_type, found.use_activation), (PoolingTypeArg::Mean, false));
    let modules = ["Transformer", "Pooling", "Normalize"];
    let last = folder(Some("pooling_mode_lasttoken"), &modules);
    let found = plan(&ARGS, last.path(), &config).unwrap().unwrap();
    assert_eq!((found.pooling_type, found.use_activation), (PoolingTypeArg::Last, true));
    let generate = PoolingArgs { runner: RunnerArg::Generate, ..ARGS };
    assert_eq!(plan(&generate, last.path(), &config).unwrap(), None);
    let plain = tempfile::tempdir().unwrap();
    assert_eq!(plan(&ARGS, plain.path(), &config).unwrap(), None);
    let no_pooling = folder(None, &["Transformer"]);
    assert_eq!(plan(&ARGS, no_pooling.path(), &config).unwrap(), None);
    let forced = PoolingArgs { runner: RunnerArg::Pooling, ..ARGS };
    let found = plan(&forced, plain.path(), &config).unwrap().unwrap();
    assert_eq!((found.pooling_type, found.task), (PoolingTypeArg::Last, PoolingTask::Embed));
}

#[test]
fn given_pooling_type_replaces_an_unsupported_one() {
    let config = demo_config();
    let cls = folder(Some("pooling_mode_cls_token"), &["Pooling", "Normalize"]);
    let given =
        PoolerConfigArg { pooling_type: Some(PoolingTypeArg::Mean), ..PoolerConfigArg::default() };
    let args = PoolingArgs { pooler_config: Some(given), ..ARGS };
    let found = plan(&args, cls.path(), &config).unwrap().unwrap();
    assert_eq!((found.pooling_type, found.use_activation), (PoolingTypeArg::Mean, true));
    let scores = ModelConfig { head: ModelHead::Classifier { sigmoid: false }, ..config };
    let found = plan(&ARGS, cls.path(), &scores).unwrap().unwrap();
    assert_eq!((found.pooling_type, found.task), (PoolingTypeArg::Last, PoolingTask::Score));
    let error = plan(&args, cls.path(), &scores).unwrap_err().to_string();
    assert!(error.contains("only use_activation"), "{error}");
}

#[test]
fn unsupported_pooling_is_rejected_with_its_name() {
    let config = demo_config();
    let cls = folder(Some("pooling_mode_cls_token"), &["Pooling"]);
    let dense = folder(Some("pooling_mode_lasttoken"), &["Pooling", "Dense"]);
    let plain = tempfile::tempdir().unwrap();
    let classify =
        PoolingArgs { convert: ConvertArg::Classify, runner: RunnerArg::Pooling, ..ARGS };
    let convert = PoolingArgs { convert: ConvertArg::Embed, ..ARGS };
    for (args, dir, part) in [
        (&ARGS, cls.path(), "pooling_mode_cls_token"),
        (&ARGS, dense.path(), "1_Dense"),
        (&classify, plain.path(), "no classification head"),
        (&convert, plain.path(), "--runner pooling"),
    ] {
        let error = format!("{:#}", plan(args, dir, &config).unwrap_err());
        assert!(error.contains(part), "{error}");
    }
    let headless = ModelConfig { head: ModelHead::Absent, ..config };
    let generate = PoolingArgs { runner: RunnerArg::Generate, ..ARGS };
    let error = plan(&generate, plain.path(), &headless).unwrap_err().to_string();
    assert!(error.contains("--runner generate"), "{error}");
    let scores = ModelConfig { head: ModelHead::Classifier { sigmoid: false }, ..headless };
    let found = plan(&ARGS, plain.path(), &scores).unwrap().unwrap();
    assert_eq!((found.task, found.use_activation), (PoolingTask::Score, false));
}
