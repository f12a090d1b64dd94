//! HTTP requests that the server sends for a client.

use serde::{Deserialize, Serialize};

use crate::base64_bytes::Base64Bytes;

/// Params of `http/request`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct HttpRequestParams {
    /// The HTTP method: `GET`, `POST`, …
    pub method: String,
    /// The URL, http or https.
    pub url: String,
    /// The headers in order; names may repeat.
    #[serde(default)]
    pub headers: Vec<HttpHeader>,
    /// The request's body.
    #[serde(default, rename = "bodyBase64", skip_serializing_if = "Option::is_none")]
    pub body: Option<Base64Bytes>,
    /// Timeout of the whole exchange in milliseconds, a streamed body included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// How to treat a redirect (3xx); followed by default.
    #[serde(default)]
    pub redirect_policy: HttpRedirectPolicy,
    /// The id in the notifications of a streamed body.
    pub request_id: String,
    /// Respond after the headers, and send the body as notifications.
    #[serde(default)]
    pub stream_response: bool,
}

/// Shows the method only: URLs and headers carry credentials.
impl std::fmt::Debug for HttpRequestParams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpRequestParams").field("method", &self.method).finish_non_exhaustive()
    }
}

/// How to treat a redirect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum HttpRedirectPolicy {
    /// Follow it.
    #[default]
    Follow,
    /// Return it as the response.
    Stop,
}

/// An HTTP header.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct HttpHeader {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
    /// An environment variable of the server whose value is appended to `value`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_env_var: Option<String>,
}

/// Shows the name only.
impl std::fmt::Debug for HttpHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpHeader").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Result of `http/request`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HttpRequestResponse {
    /// The HTTP status: 200, 404, …
    pub status: u16,
    /// The headers in order.
    pub headers: Vec<HttpHeader>,
    /// The whole body; empty if it is streamed.
    #[serde(rename = "bodyBase64")]
    pub body: Base64Bytes,
}

/// Params of the notification `http/request/bodyDelta`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct HttpRequestBodyDeltaNotification {
    /// The id that the request gave.
    pub request_id: String,
    /// The number of the notification, from 1.
    pub seq: u64,
    /// A piece of the body, at most 1 MiB.
    #[serde(rename = "deltaBase64")]
    pub delta: Base64Bytes,
    /// Whether this is the last piece.
    pub done: bool,
    /// Why the body ended early, if it did.
    pub error: Option<String>,
}

crate::encode::by_serde! { HttpRequestParams, HttpRequestResponse, HttpRequestBodyDeltaNotification }
