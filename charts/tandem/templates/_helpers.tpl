{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Release and chart in one, at most 50 long: suffixes are appended. */}}
{{- define "tandem.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $both := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $both .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tandem.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: tandem
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "tandem.operatorSelector" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "tandem.serviceAccount" -}}
{{- default (ternary (include "tandem.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "tandem.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end -}}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* "true" where the platform assigns user ids to pods. */}}
{{- define "tandem.assignedUsers" -}}
{{- if eq (toString .Values.openshift) "auto" -}}
{{- .Capabilities.APIVersions.Has "security.openshift.io/v1" -}}
{{- else -}}
{{- .Values.openshift -}}
{{- end -}}
{{- end -}}

{{- define "tandem.podSecurity" -}}
runAsNonRoot: true
{{- if ne (include "tandem.assignedUsers" .) "true" }}
runAsUser: 65532
runAsGroup: 65532
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The file of --router-settings: what of `router` is set, and the policies. Empty when nothing is. */}}
{{- define "tandem.routerSettings" -}}
{{- $set := dict -}}
{{- range $name, $value := .Values.router -}}
{{- if $value -}}{{- $_ := set $set $name $value -}}{{- end -}}
{{- end -}}
{{- if .Values.networkPolicy.enabled -}}
{{- $operator := dict "namespace" .Release.Namespace "podLabels" (include "tandem.operatorSelector" . | fromYaml) -}}
{{- $_ := set $set "networkPolicy" (merge (dict "operator" $operator) (omit .Values.networkPolicy "enabled")) -}}
{{- end -}}
{{- if $set -}}{{- toYaml $set -}}{{- end -}}
{{- end -}}
