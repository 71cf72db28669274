//! Server with a simulated device whose step times are constant, to compare load generators with each other:
//! differences between their results are caused by the load generators.

use crate::small_tokenizer::TokenizerAlphabet;
use crate::test_server::{ServerSetup, TestServer};
use std::io::Read;
use std::time::Duration;

const STEP: Duration = Duration::from_millis(200);

#[test]
#[ignore = "serves until its standard input ends; tests/conformance/clients/load_generator.py starts it"]
fn serve_until_stdin_closes() {
    let setup = ServerSetup {
        alphabet: TokenizerAlphabet::Ascii,
        blocks: 16_384,
        step_time: STEP,
        step_tokens: 8_192,
        ..ServerSetup::default()
    };
    let server = TestServer::start(&setup);
    println!("paced server on http://{}", server.address);
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest).unwrap();
}
