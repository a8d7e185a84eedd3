//! A metrics page, read back. What is not understood is passed over: another release may say more.

/// The samples of a page.
pub(super) struct Page(Vec<Sample>);

/// One value.
pub(super) struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Page {
    pub(super) fn parse(text: &str) -> Page {
        Page(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    pub(super) fn is_of_a_scheduler(&self) -> bool {
        self.value("bps_job_formed", &[]).is_some()
    }

    /// All samples of a family.
    pub(super) fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Sample> {
        self.0.iter().filter(move |sample| sample.name == name)
    }

    /// The value of the sample that has these labels, and maybe others.
    pub(super) fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let fits = |sample: &&Sample| labels.iter().all(|(key, want)| sample.label(key) == *want);
        self.of(name).find(fits).map(|sample| sample.value)
    }
}

impl Sample {
    /// A label's content; empty if there is none.
    pub(super) fn label(&self, key: &str) -> &str {
        let found = self.labels.iter().find(|(name, _)| name == key);
        found.map_or("", |(_, content)| content)
    }

    pub(super) fn value(&self) -> f64 {
        self.value
    }
}

fn sample(line: &str) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, mut rest) = line.split_at(end);
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (key, after) = rest.trim_start_matches(',').split_once("=\"")?;
            let (content, after) = quoted(after)?;
            labels.push((key.to_owned(), content));
            rest = after;
        }
        rest = &rest[1..];
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels, value })
}

/// The content up to the closing quote, and what comes behind it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut content = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((content, &text[at + 1..])),
            '\\' => match characters.next()?.1 {
                'n' => content.push('\n'),
                other => content.push(other),
            },
            other => content.push(other),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_come_back_with_their_labels() {
        let page = Page::parse(
            "# HELP a b\na 1\nb{x=\"1\",y=\"q\\\"\\\\\\n}\"} 2.5\nb{x=\"2\"} +Inf\nbad{x=\"1 3\nc\n\
             bad{} {\n",
        );
        assert_eq!(page.value("a", &[]), Some(1.0));
        assert_eq!(page.value("b", &[("x", "1")]), Some(2.5));
        assert_eq!(page.of("b").next().unwrap().label("y"), "q\"\\\n}");
        assert_eq!(page.value("b", &[("x", "2")]), Some(f64::INFINITY));
        assert_eq!(page.0.len(), 3);
        assert!(!page.is_of_a_scheduler());
    }
}
