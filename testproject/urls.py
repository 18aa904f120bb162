"""The shop and the admin."""

from django.contrib import admin
from django.urls import path

from testproject.shop import views

urlpatterns = [
    path("", views.index, name="shop"),
    path("orders/<str:reference>/", views.order, name="order"),
    path("api/orders/", views.api_orders, name="api-orders"),
    path("admin/", admin.site.urls),
]
