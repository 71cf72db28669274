//! Request fields that control services of Anthropic's API: billing, caching, MCP servers. Fields that do not
//! change what this server generates are accepted and reported as having no effect; other fields are rejected
//! by name.

use crate::api_error::ApiError;
use crate::request_fields::RequestFields;
use crate::strict_json::JsonValue;

/// Fields about caching, billing, routing and diagnostics.
const WITHOUT_EFFECT: &[&str] = &[
    "billing_policy",
    "cache_control",
    "diagnostics",
    "fallback_credit_token",
    "fallbacks",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
];
/// Fields that cause an error: they request another kind of reply, or refer to a conversation stored on the
/// server.
const UNSUPPORTED: &[&str] = &["compaction", "thread"];
/// Removes all fields that control services of Anthropic's API from `fields`, and validates them.
///
/// Errors: HTTP status 400 with the name of a field that requests an unsupported service.
pub(super) fn take(fields: &mut RequestFields) -> Result<(), ApiError> {
    for name in UNSUPPORTED {
        if fields.take(name).is_some() {
            return Err(ApiError::unsupported(*name, "is not supported by this server"));
        }
    }
    mcp_servers(fields)?;
    container(fields)?;
    for name in WITHOUT_EFFECT {
        if fields.take(name).is_some() {
            fields.accept_without_effect((*name).to_owned());
        }
    }
    Ok(())
}

/// Rejects MCP servers: in Anthropic's API, the API server calls their tools, which this server cannot do.
fn mcp_servers(fields: &mut RequestFields) -> Result<(), ApiError> {
    const NAME: &str = "mcp_servers";
    match fields.take(NAME) {
        None => Ok(()),
        Some(JsonValue::List(servers)) if servers.is_empty() => Ok(()),
        Some(_) => {
            let message = "MCP servers are not supported: connect them in the client, and send their \
                           tools in tools";
            Err(ApiError::unsupported(NAME, message))
        }
    }
}

/// Accepts a container id, which only code execution tools use; rejects skills.
fn container(fields: &mut RequestFields) -> Result<(), ApiError> {
    const NAME: &str = "container";
    match fields.take(NAME) {
        None => return Ok(()),
        Some(JsonValue::Str(_)) => {}
        Some(value) => {
            let mut container = RequestFields::of(NAME.to_owned(), value)?;
            let path = container.path("skills");
            match container.take("skills") {
                None => {}
                Some(JsonValue::List(skills)) if skills.is_empty() => {}
                Some(_) => {
                    return Err(ApiError::unsupported(path, "is not supported by this server"));
                }
            }
        }
    }
    fields.accept_without_effect(NAME.to_owned());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(body: &str) -> Result<Vec<String>, ApiError> {
        let mut fields = RequestFields::of_body(JsonValue::parse(body.as_bytes()).unwrap())?;
        take(&mut fields)?;
        assert_eq!(fields.remaining(), 0, "{body}");
        Ok(fields.hints().names())
    }

    #[test]
    fn fields_without_effect_are_named() {
        let body = r#"{"mcp_servers":[],"container":"c1","metadata":{},"speed":"fast",
            "inference_geo":"eu","service_tier":"auto","cache_control":{}}"#;
        let names = taken(body).unwrap();
        let expected =
            ["container", "cache_control", "inference_geo", "metadata", "service_tier", "speed"];
        assert_eq!(names, expected);
        assert!(taken(r#"{"mcp_servers":[],"container":null}"#).unwrap().is_empty());
    }

    #[test]
    fn services_that_this_server_lacks_are_rejected_by_name() {
        for (body, param) in [
            (r#"{"mcp_servers":[{"type":"url","name":"a","url":"http://a"}]}"#, "mcp_servers"),
            (r#"{"container":{"skills":[{"skill_id":"pdf"}]}}"#, "container.skills"),
            (r#"{"compaction":{"type":"summarize"}}"#, "compaction"),
            (r#"{"thread":{"type":"create"}}"#, "thread"),
        ] {
            assert_eq!(taken(body).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }
}
