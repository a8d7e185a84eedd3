//! Rust files as the tidy rules see them: code apart from comments and literals, tests apart from
//! the rest.
//!
//! This is no parser. It knows comments, literals and braces, which is enough for the rules here
//! and keeps them free of a compiler's version. A file must be formatted by rustfmt.

use std::path::{Path, PathBuf};

/// One Rust file.
pub struct Source {
    /// Path from the repository's root, with forward slashes.
    pub path: String,
    /// The lines as they are.
    pub text: Vec<String>,
    /// The same lines with comments removed and literals emptied.
    pub code: Vec<String>,
    /// The same lines with nothing but their comments.
    pub comment: Vec<String>,
    /// Whether a line belongs to a test.
    pub test: Vec<bool>,
}

/// A rule that a line breaks.
pub struct Violation {
    /// Path from the repository's root.
    pub path: String,
    /// Counted from 1; 0 is the whole file.
    pub line: usize,
    /// The rule, and what to do about it.
    pub message: String,
}

/// The repository's root folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the crate has a parent")
}

/// Folders that hold what tools made, not what people wrote.
const BUILT: [&str; 9] =
    ["target", ".git", ".venv", ".cache", "__pycache__", "node_modules", "build", "dist", "corpus"];

/// All files below `folder` whose name ends in `suffix`, sorted, as paths from the root.
pub fn files(folder: &str, suffix: &str) -> Vec<String> {
    fn walk(root: &Path, folder: &Path, suffix: &str, found: &mut Vec<String>) {
        let Ok(entries) = std::fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if !BUILT.contains(&name.as_str()) && !name.ends_with(".egg-info") {
                    walk(root, &path, suffix, found);
                }
            } else if name.ends_with(suffix) {
                let relative = path.strip_prefix(root).expect("it was found below the root");
                found.push(relative.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    let root = root();
    let mut found = Vec::new();
    walk(&root, &root.join(folder), suffix, &mut found);
    found.sort();
    found
}

/// Every Rust file of the repository.
pub fn sources() -> Vec<Source> {
    let sources: Vec<Source> = files("", ".rs")
        .into_iter()
        .map(|path| {
            let text = std::fs::read_to_string(root().join(&path)).expect("a Rust file is UTF-8");
            Source::new(path, &text)
        })
        .collect();
    assert!(sources.len() > 20, "only {} Rust files found: is the root right?", sources.len());
    sources
}

/// Fails with everything that was found.
pub fn report(violations: &[Violation]) {
    let lines: Vec<String> = violations
        .iter()
        .map(|found| format!("{}:{}: {}", found.path, found.line, found.message))
        .collect();
    assert!(lines.is_empty(), "{} found:\n{}", lines.len(), lines.join("\n"));
}

impl Source {
    /// Takes a file apart.
    pub fn new(path: String, text: &str) -> Source {
        let (code, comment) = split(text);
        let lines = |text: &str| text.split('\n').map(str::to_owned).collect::<Vec<_>>();
        let (text, code, comment) = (lines(text.trim_end()), lines(&code), lines(&comment));
        let name = path.rsplit('/').next().unwrap_or(&path);
        let whole =
            path.starts_with("tests/") || path.contains("/tests/") || name.ends_with("tests.rs");
        let test = if whole { vec![true; code.len()] } else { mark_tests(&code) };
        Source { path, text, code, comment, test }
    }

    /// A violation in this file; `line` counts from 0.
    pub fn violation(&self, line: usize, message: impl Into<String>) -> Violation {
        Violation { path: self.path.clone(), line: line + 1, message: message.into() }
    }

    /// Every place where `path` (such as `std::env::var`) is written in code, as line (from 0) and
    /// the column just after it. Longer names that contain it do not count.
    pub fn places(&self, path: &str) -> Vec<(usize, usize)> {
        let mut places = Vec::new();
        for (line, code) in self.code.iter().enumerate() {
            places.extend(words(code, path).map(|at| (line, at + path.len())));
        }
        places
    }

    /// The code from a place on, to the end of the file, on one line.
    pub fn rest(&self, line: usize, column: usize) -> String {
        let mut rest = self.code[line][column..].to_owned();
        for code in &self.code[line + 1..] {
            rest.push(' ');
            rest.push_str(code);
            if rest.len() > 4000 {
                break;
            }
        }
        rest
    }

    /// Name, first line and last line (from 0) of each function that has a body.
    pub fn functions(&self) -> Vec<(String, usize, usize)> {
        let mut functions = Vec::new();
        for (line, column) in self.places("fn") {
            let rest = self.code[line][column..].trim_start();
            let name: String = rest.chars().take_while(|c| is_word(*c)).collect();
            if name.is_empty() {
                continue; // A function pointer's type.
            }
            if let Some(end) = body_end(&self.code, line, column) {
                functions.push((name, line, end));
            }
        }
        functions
    }
}

/// The first names of what follows `crate::` or the like: one, or those of a group in braces.
pub fn first_names(rest: &str) -> Vec<String> {
    let rest = rest.trim_start();
    let Some(group) = rest.strip_prefix('{') else {
        return vec![rest.chars().take_while(|c| is_word(*c)).collect()];
    };
    let (mut names, mut name, mut depth, mut first) = (Vec::new(), String::new(), 0, true);
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(std::mem::take(&mut name));
                first = true;
            }
            c if depth == 0 && first && is_word(c) => name.push(c),
            c if c.is_whitespace() && name.is_empty() => {}
            _ => first = false,
        }
    }
    names.push(name);
    names.retain(|name| !name.is_empty());
    names
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Where `path` stands in `code` as whole words.
pub fn words<'a>(code: &'a str, path: &'a str) -> impl Iterator<Item = usize> + 'a {
    code.match_indices(path).map(|(at, _)| at).filter(move |&at| {
        let before = code[..at].chars().next_back();
        let after = code[at + path.len()..].chars().next();
        !(before.is_some_and(is_word) || path.ends_with(is_word) && after.is_some_and(is_word))
    })
}

/// The line of the brace that closes the first one after this place; none if `;` comes first.
fn body_end(code: &[String], line: usize, column: usize) -> Option<usize> {
    let (mut depth, mut round) = (0_usize, 0_usize);
    for (at, text) in code.iter().enumerate().skip(line) {
        let text = if at == line { &text[column..] } else { text };
        for c in text.chars() {
            match c {
                '(' | '[' => round += 1,
                ')' | ']' => round = round.saturating_sub(1),
                '{' => depth += 1,
                ';' if depth == 0 && round == 0 => return None,
                '}' => {
                    depth = depth.checked_sub(1)?;
                    if depth == 0 {
                        return Some(at);
                    }
                }
                _ => {}
            }
        }
    }
    None
}

/// Marks what `#[cfg(test)]` and `#[cfg(all(test, …))]` apply to.
fn mark_tests(code: &[String]) -> Vec<bool> {
    let mut test = vec![false; code.len()];
    for line in 0..code.len() {
        let text = code[line].trim_start();
        if text.starts_with("#[cfg(test)]") || text.starts_with("#[cfg(all(test") {
            let end = body_end(code, line, 0).unwrap_or(line + 1).min(code.len() - 1);
            test[line..=end].fill(true);
        }
    }
    test
}

/// Code and comments of a text, each with the text's line breaks.
fn split(text: &str) -> (String, String) {
    let characters: Vec<char> = text.chars().collect();
    let (mut code, mut comment) = (String::new(), String::new());
    let at = |index: usize| characters.get(index).copied().unwrap_or('\0');
    let mut index = 0;
    while index < characters.len() {
        let end = match (at(index), at(index + 1)) {
            ('/', '/') => end_of_line(&characters, index),
            ('/', '*') => end_of_block(&characters, index),
            ('"', _) => end_of_string(&characters, index + 1),
            ('r', '"' | '#') if !is_word(at(index.wrapping_sub(1))) || at(index - 1) == 'b' => {
                end_of_raw(&characters, index)
            }
            ('\'', '\\') => end_of_char(&characters, index + 2),
            ('\'', _) if at(index + 2) == '\'' => index + 3,
            _ => index + 1,
        };
        let is_comment = at(index) == '/' && matches!(at(index + 1), '/' | '*');
        let is_literal = end > index + 1 && !is_comment;
        for &c in &characters[index..end] {
            match c {
                '\n' => {
                    code.push('\n');
                    comment.push('\n');
                }
                c if is_comment => comment.push(c),
                _ if is_literal => {}
                c => code.push(c),
            }
        }
        if is_literal {
            code.push_str("\"\"");
        }
        index = end;
    }
    (code, comment)
}

fn end_of_line(characters: &[char], from: usize) -> usize {
    characters[from..].iter().position(|c| *c == '\n').map_or(characters.len(), |n| from + n)
}

fn end_of_block(characters: &[char], from: usize) -> usize {
    let (mut depth, mut index) = (0, from);
    while index < characters.len() {
        match characters[index..] {
            ['/', '*', ..] => (depth, index) = (depth + 1, index + 2),
            ['*', '/', ..] => (depth, index) = (depth - 1, index + 2),
            _ => index += 1,
        }
        if depth == 0 {
            break;
        }
    }
    index
}

fn end_of_string(characters: &[char], from: usize) -> usize {
    let mut index = from;
    while index < characters.len() {
        match characters[index] {
            '\\' => index += 2,
            '"' => return index + 1,
            _ => index += 1,
        }
    }
    characters.len()
}

fn end_of_raw(characters: &[char], from: usize) -> usize {
    let hashes = characters[from + 1..].iter().take_while(|c| **c == '#').count();
    let mut index = from + 1 + hashes;
    if characters.get(index) != Some(&'"') {
        return from + 1; // A raw identifier.
    }
    index += 1;
    while index < characters.len() {
        let closes = characters[index] == '"'
            && characters[index + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes;
        index += 1;
        if closes {
            return index + hashes;
        }
    }
    characters.len()
}

fn end_of_char(characters: &[char], from: usize) -> usize {
    let escaped = from + 1;
    characters[escaped..].iter().position(|c| *c == '\'').map_or(from, |n| escaped + n + 1)
}

#[test]
fn code_and_comments_are_told_apart() {
    let text = concat!(
        "//! Owns.\nfn a<'x>(s: &'x str) { // why\n    let c = '\\'';\n",
        "    b(\"{ // \\\" no\", '{');\n}\n",
        "#[cfg(test)]\nmod tests {\n    fn t() { r#\"}\"#; /* } /* } */ */ }\n}\n",
        "use crate::{base::{A, B}, wire, x::*};\n",
    );
    let source = Source::new("engine/src/x.rs".into(), text);
    let functions = source.functions();
    assert_eq!(functions, [("a".to_owned(), 1, 4), ("t".to_owned(), 7, 7)]);
    assert_eq!(source.comment[1], "// why");
    assert_eq!(source.test[4..10], [false, true, true, true, true, false]);
    let (line, column) = source.places("crate::")[0];
    assert_eq!(first_names(&source.rest(line, column)), ["base", "wire", "x"]);
}
