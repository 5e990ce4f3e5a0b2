{{/*
What the operator may do in a namespace whose pools it serves. Creating pods is not all: a role that
it hands to an EPP may grant only what the operator holds itself (pods: get, list, watch).
*/}}
{{- define "tandem.namespaceRules" -}}
# The patch is for spec.replicas of pools whose user states no number, and for nothing else.
- apiGroups: [tandem.dev]
  resources: [prefillpools, decodepools]
  verbs: [list, watch, patch]
- apiGroups: [tandem.dev]
  resources: [prefillpools/status, decodepools/status]
  verbs: [patch]
# Pods and revisions block their owner's deletion. Where the API server checks that (OpenShift), only
# who may set finalizers of the owner may create them.
- apiGroups: [tandem.dev]
  resources: [prefillpools/finalizers, decodepools/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
# Downloads of models before their pods (model.cache.prePull).
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [list, watch, create, patch, delete]
# Plan keys of endpoints and transfer keys of sets, by their names: to list or watch them would be to read every Secret.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [list, watch, create, patch, delete]
# Where the cluster has these kinds.
- apiGroups: [inference.networking.k8s.io, inference.networking.x-k8s.io]
  resources: [inferencepools]
  verbs: [list, watch, create, patch, delete]
# Only to be handed on to the EPPs.
- apiGroups: [llm-d.ai, inference.networking.x-k8s.io]
  resources: [inferencemodelrewrites, inferenceobjectives]
  verbs: [get, list, watch]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}

{{/* What has no namespace: sizes of nodes, and the version of the CRDs. */}}
{{- define "tandem.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  resourceNames: [prefillpools.tandem.dev, decodepools.tandem.dev]
  verbs: [get]
{{- end -}}
