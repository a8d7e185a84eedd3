//! `docs/env.md` says what the table of knobs says, and `docs/metrics.md` what that of the metrics
//! says. `BPS_BLESS=1` writes them anew.

use std::path::Path;

fn compare(document: &str, table: &str, wanted: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(document);
    if std::env::var_os("BPS_BLESS").is_some() {
        std::fs::write(&path, wanted).expect("documents are writable");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    let differing = found.lines().zip(wanted.lines()).find(|(found, wanted)| found != wanted);
    assert!(
        found == wanted,
        "{document} differs from the table in {table}; run \
         `BPS_BLESS=1 cargo test -p bps-tests --test env_docs`. First difference: {differing:?}"
    );
}

#[test]
fn env_md_is_what_the_table_says() {
    compare("docs/env.md", "engine/src/config/table", &bps_engine::config::document());
}

#[test]
fn metrics_md_is_what_the_table_says() {
    let wanted = bps_engine::metrics::document();
    compare("docs/metrics.md", "engine/src/metrics/families.rs", &wanted);
}
