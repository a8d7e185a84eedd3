//! Size, headers, forbidden words and the shape of the top level.

use super::source::{Violation, files, report, root, sources};

/// Columns of a line.
const COLUMNS_MAX: usize = 100;
/// Lines of a file.
const FILE_LINES_MAX: usize = 600;
/// Lines of a function.
const FUNCTION_LINES_MAX: usize = 100;

/// Files that may be longer, each with the reason.
const LONG_FILES: &[(&str, &str)] = &[];

/// Functions that may be longer, as file and name, each with the reason.
const LONG_FUNCTIONS: &[(&str, &str, &str)] = &[];

/// All that the top level of the repository holds, beside dotfiles and what git ignores.
const TOP_LEVEL: &[&str] = &[
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "docs",
    "engine",
    "perf",
    "python",
    "server",
    "tests",
    "worker",
];

#[test]
fn lines_fit_the_screen() {
    let mut violations = Vec::new();
    for source in sources() {
        for (line, text) in source.text.iter().enumerate() {
            let columns = text.chars().count();
            if columns > COLUMNS_MAX {
                let message = format!("line of {columns} columns: at most {COLUMNS_MAX}, break it");
                violations.push(source.violation(line, message));
            }
            if text.ends_with([' ', '\t']) {
                violations.push(source.violation(line, "white space at the end of the line"));
            }
        }
    }
    report(&violations);
}

#[test]
fn files_and_functions_are_short() {
    let mut violations = Vec::new();
    for source in sources() {
        let lines = source.text.len();
        if lines > FILE_LINES_MAX && !LONG_FILES.iter().any(|(path, _)| *path == source.path) {
            let message =
                format!("{lines} lines: at most {FILE_LINES_MAX}; is it still one thing?");
            violations.push(source.violation(0, message));
        }
        for (name, first, last) in source.functions() {
            let lines = last - first + 1;
            let excepted = LONG_FUNCTIONS
                .iter()
                .any(|(path, function, _)| *path == source.path && *function == name);
            if lines > FUNCTION_LINES_MAX && !excepted {
                let message =
                    format!("function `{name}` has {lines} lines: at most {FUNCTION_LINES_MAX}");
                violations.push(source.violation(first, message));
            }
        }
    }
    for (path, reason) in LONG_FILES {
        assert!(root().join(path).exists() && !reason.is_empty(), "LONG_FILES: {path} is gone");
    }
    report(&violations);
}

#[test]
fn every_file_says_what_it_owns() {
    let mut violations = Vec::new();
    for source in sources() {
        let mut lines = source.text.iter().filter(|line| !line.starts_with("#!"));
        let first = lines.next().map_or("", String::as_str);
        let words = first.strip_prefix("//! ").map_or(0, |text| text.split(' ').count());
        if words < 3 {
            let message = "a file opens with `//!`: what it owns, who calls it, its invariant";
            violations.push(source.violation(0, message));
        }
        if first.contains("To be written") {
            violations.push(source.violation(0, "a stub: write it or remove it"));
        }
    }
    report(&violations);
}

#[test]
fn unwrap_states_its_reason() {
    let mut violations = Vec::new();
    for source in sources() {
        for (line, _) in source.places("unwrap()") {
            let said = !source.comment[line].is_empty()
                || line > 0 && !source.comment[line - 1].is_empty();
            if !source.test[line] && !said {
                let message = "unwrap: use `expect` with the invariant, or return an error";
                violations.push(source.violation(line, message));
            }
        }
    }
    report(&violations);
}

#[test]
fn the_top_level_holds_only_what_is_named() {
    let ignored = std::fs::read_to_string(root().join(".gitignore")).unwrap_or_default();
    let ignored: Vec<&str> = ignored.lines().map(|line| line.trim_matches('/')).collect();
    for entry in std::fs::read_dir(root()).expect("the root is a folder").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let named = name.starts_with('.') || TOP_LEVEL.contains(&name.as_str());
        assert!(
            named || ignored.contains(&name.as_str()),
            "{name}: the top level holds {TOP_LEVEL:?} and dotfiles; find it a place below them"
        );
    }
}

#[test]
fn nothing_names_the_machine_it_was_written_on() {
    // Put together here, so that this file does not name them either.
    let machine =
        [["/wo", "rk/"], ["/ro", "ot/"], ["/ho", "me/"], ["index-", "url"], ["replace-", "with"]];
    let mut violations = Vec::new();
    for suffix in [".rs", ".py", ".md", ".toml", ".lock", ".pyi", ".sh", "run", "quickstart"] {
        for path in files("", suffix) {
            let text = std::fs::read_to_string(root().join(&path)).unwrap_or_default();
            for (line, text) in text.lines().enumerate() {
                for words in &machine {
                    let word = words.concat();
                    if text.contains(&word) {
                        let message =
                            format!("`{word}` holds on one machine only: make it relative");
                        violations.push(Violation { path: path.clone(), line: line + 1, message });
                    }
                }
            }
        }
    }
    report(&violations);
}
