//! A server whose steps all take the same time, for load generators that are compared with each other: what
//! they disagree on is theirs.

use crate::http_host::{Server, Setup};
use crate::small_tokenizer::Alphabet;
use std::io::Read;
use std::time::Duration;

const STEP: Duration = Duration::from_millis(200);

#[test]
#[ignore = "serves until its standard input ends; tests/conformance/clients/load_generator.py starts it"]
fn serve() {
    let setup = Setup {
        alphabet: Alphabet::Ascii,
        blocks: 16_384,
        step_time: STEP,
        step_tokens: 8_192,
        ..Setup::default()
    };
    let server = Server::start(&setup);
    println!("paced server on http://{}", server.address);
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest).unwrap();
}
