//! Where a measurement was taken: without this a figure means nothing to anyone else.

#![forbid(unsafe_code)]

use serde_json::{Value, json};

/// Host, kernel, processor, cores that this process may use, and the commit that this was built
/// from, where `-dirty` marks changes that were not committed.
pub fn describe() -> Value {
    let system = rustix::system::uname();
    json!({
        "host": system.nodename().to_string_lossy(),
        "kernel": system.release().to_string_lossy(),
        "processor": processor(),
        "cores": std::thread::available_parallelism().map_or(0, std::num::NonZero::get),
        "commit": env!("BPS_COMMIT"),
        "optimised": !cfg!(debug_assertions),
    })
}

/// One line of [`describe`], for people.
pub fn line(place: &Value) -> String {
    let text = |name: &str| match &place[name] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let warning = if cfg!(debug_assertions) { ", NOT AN OPTIMISED BUILD" } else { "" };
    format!(
        "{}: {}, {} cores, Linux {}, commit {}{warning}",
        text("host"),
        text("processor"),
        text("cores"),
        text("kernel"),
        text("commit"),
    )
}

fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name"));
    model.map_or("unknown processor", |rest| rest.trim_start_matches([' ', '\t', ':'])).to_string()
}
