//! Dry run of a grammar: a worker process compiles it and generates some of its texts before the server
//! compiles it.
//!
//! No limit of llguidance bounds all of its work, a thread cannot be stopped, and memory of a thread belongs
//! to the whole process. A process can be killed. Therefore each grammar first runs in a child process of low
//! priority with bounded memory. If the child is not done in time, it is killed and the grammar is rejected.
//! After a successful dry run the server compiles the grammar again with the same code, at a cost that is
//! known by then. A compiled grammar cannot be sent between processes: it is a graph of tables that grow
//! while masks are computed, without a serialised form.
//!
//! The child runs the `hadron` executable as `hadron grammar-worker`. Its standard input is a socket on which
//! it receives the vocabulary once and then grammars, one at a time, each answered before the next. It has no
//! tokenizer: it tokenizes forced text greedily with the longest tokens that fit.

mod child;
mod message;
mod process;
mod starvation_watchdog;

pub use child::serve;
pub(super) use message::vocabulary_frame;
pub(super) use process::GrammarWorkerProcess;
